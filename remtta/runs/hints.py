"""Hints at options that suit a stream better."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import numpy as np

from remtta.runs.loop import BatchResult
from remtta.streams.prefetch import DecodedFrame

_FASTER = {"--method remtta --adapt-every 2": 2.0, "--method fast": 1.0}
"""Options of less cost, in forward passes."""
_FRAMES_MEASURED, _BATCHES_MEASURED, _SECONDS_MEASURED = 8, 2, 5.0
_SETTLING_S = 2.0  # after an opening, where frames that were read to detect the codec arrive all at once
_SLOWER = 0.9  # below this share of its rate, a source is too fast

_MIN_PAIRS = 3  # of neighbouring frames
_NEAR_EQUAL = 3.0  # of 255: what noise and slow motion change from frame to frame
_SLOW_VIDEO_S = 0.15  # between frames
_VARIED_PER_S = 3  # frames of a video that --frame-stride is to leave, roughly

_log = logging.getLogger("remtta")


class RateCheck:
    """Warns once, after the first seconds, if a live source gives frames faster than the method takes them. If it
    `skips_updates` to keep up, only batches without an update are timed.

    Args:
        method: Name of the method.
        passes: Its cost of an image in plain forward passes.
        stride: Frames of the source per frame used.
    """

    def __init__(self, method: str, passes: float, stride: int, *, skips_updates: bool = False) -> None:
        self._method, self._passes, self._stride, self._skips_updates = method, passes, stride, skips_updates
        self._settled_s: float | None = None  # time from which on frames are measured
        self._first: DecodedFrame | None = None  # the last one before them
        self._batches, self._frames, self._seconds = 0, 0, 0.0
        self._is_done = False

    def record(self, result: BatchResult) -> None:
        """Record a batch."""
        arrived = [frame for frame in result.batch.readable if frame.read_at]  # not those of a finite video
        if not arrived or self._is_done or (self._skips_updates and result.adapted):
            return
        last, now_s = arrived[-1], arrived[-1].time_s or 0.0
        if self._settled_s is None or any(frame.gap for frame in result.batch.frames):
            self._settled_s, self._first = now_s + _SETTLING_S, None
        if now_s < self._settled_s:
            return
        if self._first is None:
            self._first, self._batches, self._frames, self._seconds = last, 0, 0, 0.0
            return
        self._batches, self._frames = self._batches + 1, self._frames + len(result.batch.frames)
        self._seconds += result.seconds
        seconds = now_s - (self._first.time_s or 0.0)
        enough = self._frames >= _FRAMES_MEASURED and self._batches >= _BATCHES_MEASURED
        if not enough or seconds < _SECONDS_MEASURED:
            return
        self._is_done = True
        rate = ((last.number or 0) - (self._first.number or 0)) / self._stride / seconds
        speed = self._frames / max(self._seconds, 1e-9)
        if speed < _SLOWER * rate:
            text = "%s can process %.1f frames/s here, but the source delivers %.1f; %s"
            _log.warning(text, self._method, speed, rate, self._remedy(speed, rate))

    def _remedy(self, speed: float, rate: float) -> str:
        # Plain forward passes per second.
        forward = 0.0 if self._skips_updates else speed * self._passes
        for options, passes in _FASTER.items():
            if forward > rate * passes:
                return f"{options} --latency --realtime would (about {forward / passes:.1f} frames/s)"
        return f"use a smaller model, or --frame-stride {math.ceil(self._stride * rate / speed)}"


def hint_at_stride(source: str, frames: Sequence[DecodedFrame]) -> None:
    """Name --frame-stride if the readable frames of a video's first batch hardly differ from one to the next."""
    timed = [frame for frame in frames if frame.time_s is not None]
    pairs = [(a, b) for a, b in pairwise(timed) if a.source == b.source and b.number == (a.number or 0) + 1]
    if len(pairs) < _MIN_PAIRS:
        return
    seconds = median((b.time_s or 0) - (a.time_s or 0) for a, b in pairs)
    if 0 < seconds < _SLOW_VIDEO_S and median(_difference(a, b) for a, b in pairs) < _NEAR_EQUAL:
        text = (
            "the frames of %s are nearly the same from one to the next (%.0f per second); --frame-stride %d gives more "
            "varied batches, in less time"
        )
        _log.info(text, source, 1 / seconds, max(2, round(1 / seconds / _VARIED_PER_S)))


def _difference(before: DecodedFrame, after: DecodedFrame) -> float:
    """Return the mean absolute difference of two frames, in levels of 255."""
    assert before.image is not None and after.image is not None
    return float(np.abs(before.image.numpy().astype(np.int16) - after.image.numpy()).mean())
