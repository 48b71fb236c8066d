"""Check that a method keeps up with a live source."""

from __future__ import annotations

import logging
import math

from remtta.runs.loop import BatchResult
from remtta.streams.prefetch import DecodedFrame

_FASTER = {"--method remtta --adapt-every 2": 2.0, "--method fast": 1.0}
"""Options of less cost, in forward passes."""
_FRAMES_MEASURED, _BATCHES_MEASURED, _SECONDS_MEASURED = 8, 2, 5.0
_SETTLING_S = 2.0  # after an opening, where frames that were read to detect the codec arrive all at once
_SLOWER = 0.9  # below this share of its rate, a source is too fast

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
