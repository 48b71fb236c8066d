"""Which frames `adapt` predicts but does not learn from: to keep up with a stream, and by their content.

By their content only frames of videos are left out: stills, including repeated or black ones, were chosen by the user,
and their order may be meaningless.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from remtta.errors import UsageError
from remtta.runs.hints import RateCheck
from remtta.runs.loop import OUT_OF_TIME, BatchResult, LearningPolicy
from remtta.runs.summary import RunProgress
from remtta.streams.batches import Batch
from remtta.streams.prefetch import DecodedFrame

BLACK = "black frame"
DUPLICATE = "duplicate of the frame before"

_BLACK_MEAN = _BLACK_DEVIATION = 2.0  # of 255: leaves room for sensor noise and compression

_MEMORY = 0.3  # weight of the newest batch in the expected duration of an update

_log = logging.getLogger("remtta")


class TimeBudget:
    """Decides for each batch whether there is time for an update.

    Args:
        max_ms: Mean time per frame that predictions and updates may take, in ms.
        realtime: Adapt only while processing lags behind the stream's timestamps by at most one batch or one frame
            interval. The comparison restarts where the timestamps do, e.g. at the next video of a folder.
    """

    def __init__(
        self, max_ms: float | None = None, realtime: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_frame = None if max_ms is None else max_ms / 1000
        self._realtime, self._clock = realtime, clock
        self._warned = False
        self._credit = 0.0
        self._expected: float | None = None  # expected seconds per frame of a batch with an update
        self._origin = 0.0  # clock time at stream time 0
        self._latest: float | None = None  # stream time of the last frame

    def allows(self, batch: Sequence[DecodedFrame]) -> bool:
        """Return whether to adapt to this batch; raise UsageError if `realtime` is set and frames have no times."""
        in_time = not self._realtime or self._keeps_up(batch)
        if self._per_frame is None:
            return in_time
        self._credit += self._per_frame * len(batch)
        expected = 0.0 if self._expected is None else self._expected * len(batch)
        return in_time and expected <= self._credit

    def record(self, seconds: float, num_frames: int, *, adapted: bool) -> None:
        """Record the duration of a batch."""
        if self._per_frame and not adapted and seconds > 2 * self._per_frame * num_frames and not self._warned:
            self._warned = True
            text = "predictions alone take %.1f ms per frame, which is over --max-ms %g: adaptation stops"
            _log.warning(text, 1000 * seconds / num_frames, 1000 * self._per_frame)
        if adapted:
            new = seconds / num_frames
            self._expected = new if self._expected is None else (1 - _MEMORY) * self._expected + _MEMORY * new
        # Limit the influence of a long wait or a slow batch on later batches.
        most = (self._expected or 0.0) * num_frames + (self._per_frame or 0.0) * num_frames
        self._credit = min(max(self._credit - seconds, -most), most)

    def _keeps_up(self, batch: Sequence[DecodedFrame]) -> bool:
        times = [frame.time_s for frame in batch if frame.image is not None]
        first, last = times[0], times[-1]
        if first is None or last is None:
            raise UsageError("--realtime needs the times of a video or a live source, and these frames have none")
        now, before, self._latest = self._clock(), self._latest, last
        if before is None or not before <= first <= last:  # another video begins
            self._origin, before = now - last, first
        return now - self._origin - last <= max(last - first, first - before)


class LearnableFrames(LearningPolicy):
    """Learns from all but black and repeated frames, while there is time; stores the last video frame's fingerprint."""

    def __init__(self, progress: RunProgress, budget: TimeBudget, rate: RateCheck | None = None) -> None:
        self._progress, self._budget, self._rate = progress, budget, rate

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        reasons = unlearnable_frames(batch.frames, self._progress.fingerprint)
        if self._budget.allows(batch.frames):
            return reasons
        return {frame.index: OUT_OF_TIME for frame in batch.readable} | reasons

    def finished(self, result: BatchResult) -> None:
        """Store the batch's last fingerprint and its duration."""
        video = [frame.image for frame in result.batch.readable if frame.number is not None]
        if video and video[-1] is not None:
            self._progress.fingerprint = fingerprint(video[-1])
        self._budget.record(result.seconds, len(result.batch.frames), adapted=result.adapted)
        if self._rate:
            self._rate.record(result)


def unlearnable_frames(frames: Sequence[DecodedFrame], before: str | None) -> dict[int, str]:
    """Find frames that are black, or equal to the previous one, as from lost signals and frozen cameras.

    Return reasons by frame index; `before` is the fingerprint of the last readable video frame before them.
    """
    reasons: dict[int, str] = {}
    for frame in frames:
        if frame.image is None or frame.number is None:
            continue
        previous, before = before, fingerprint(frame.image)
        if _is_black(frame.image):
            reasons[frame.index] = BLACK
        elif before == previous:
            reasons[frame.index] = DUPLICATE
    return reasons


def fingerprint(image: Tensor) -> str:
    """Return a hash of an image (3, H, W) of bytes."""
    return hashlib.blake2b(image.numpy().tobytes(), digest_size=16).hexdigest()


def _is_black(image: Tensor) -> bool:
    levels = image.numpy()  # NumPy uses a single thread, unlike torch, whose threads the model keeps busy
    return bool(levels.mean() < _BLACK_MEAN) and bool(levels.std() < _BLACK_DEVIATION)
