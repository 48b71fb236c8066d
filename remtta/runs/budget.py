"""Which frames `adapt` predicts but does not learn from: to keep up with a stream, and by their content."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect, bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from remtta.errors import UsageError
from remtta.runs.hints import RateCheck
from remtta.runs.loop import OUT_OF_TIME, BatchResult, LearningPolicy
from remtta.runs.summary import RunProgress
from remtta.streams.batches import Batch
from remtta.streams.fitness import fingerprint, unlearnable_frames
from remtta.streams.prefetch import DecodedFrame

_MEMORY = 0.3  # weight of the newest batch in the expected duration of an update
_SHORTEST_S, _LONGEST_S, _BINS = 1e-4, 1e4, 512  # range of latencies, on a logarithmic scale: exact to within 4 %
_EDGES_S = [_SHORTEST_S * math.pow(_LONGEST_S / _SHORTEST_S, number / _BINS) for number in range(1, _BINS + 1)]


_log = logging.getLogger("remtta")


class Latencies:
    """A fixed-size histogram of latencies."""

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.seconds = 0.0  # sum of all latencies
        self.before: dict[str, float] | None = None  # percentiles of an earlier part of the run, until there are frames

    def add(self, seconds: float, count: int) -> None:
        """Add a latency of `count` frames."""
        self._counts[min(_BINS - 1, bisect(_EDGES_S, seconds))] += count
        self.seconds += seconds * count

    def cumulative_counts(self, edges: Sequence[float]) -> list[int]:
        """Return the number of frames at or below each edge, to within a bin, followed by the number of all frames."""
        below = [0, *accumulate(self._counts)]
        return [*(below[bisect(_EDGES_S, edge)] for edge in edges), below[-1]]

    def percentiles_ms(self) -> dict[str, float] | None:
        """Return latency percentiles in ms, as "p50" etc., upper edges of the bins; `before` if there are no frames."""
        below = list(accumulate(self._counts))
        if not below[-1]:
            return self.before
        bins = {percent: bisect_left(below, percent / 100 * below[-1]) for percent in (50, 95, 99)}
        return {f"p{percent}": round(1000 * _EDGES_S[index], 3) for percent, index in bins.items()}


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
