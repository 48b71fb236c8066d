"""Keep up with a stream: leave updates out before any prediction is late."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate

from remtta.errors import UsageError
from remtta.streams.prefetch import DecodedFrame

OUT_OF_TIME = "out of time"

_MEMORY = 0.3  # weight of the newest batch in what an update is expected to take
_SHORTEST_S, _LONGEST_S, _BINS = 1e-4, 1e4, 512  # of the latencies, on a scale of equal ratios: within 4 %

_log = logging.getLogger("remtta")


class Latencies:
    """How long predictions took, as a histogram of fixed size.

    Attributes:
        before: What is told without frames: the percentiles of an earlier part of the run.
        seconds: All of them together.
    """

    def __init__(self) -> None:
        self._counts = [0] * _BINS
        self.seconds = 0.0
        self.before: dict[str, float] | None = None

    def add(self, seconds: float, count: int) -> None:
        """Note a latency for so many frames."""
        place = math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / math.log(_LONGEST_S / _SHORTEST_S)
        self._counts[min(_BINS - 1, int(place * _BINS))] += count
        self.seconds += seconds * count

    def cumulated(self, edges: Sequence[float]) -> list[int]:
        """How many frames took at most so many seconds, to within a bin; and in the end all."""
        upper = [_SHORTEST_S * math.pow(_LONGEST_S / _SHORTEST_S, number / _BINS) for number in range(1, _BINS + 1)]
        below = list(accumulate(self._counts))
        return [*(below[bisect(upper, edge) - 1] if edge >= upper[0] else 0 for edge in edges), below[-1]]

    def percentiles_ms(self, wanted: Sequence[int] = (50, 95, 99)) -> dict[str, float] | None:
        """Latencies in ms that so many percent of the frames stay under, by "p50" and so on; `before` without frames.

        They are upper edges of the histogram's bins.
        """
        total = sum(self._counts)
        return {f"p{percent}": self._percentile_ms(percent, total) for percent in wanted} if total else self.before

    def _percentile_ms(self, percent: int, total: int) -> float:
        number = next(n for n, below in enumerate(accumulate(self._counts), 1) if below * 100 >= percent * total)
        return round(1000.0 * _SHORTEST_S * math.pow(_LONGEST_S / _SHORTEST_S, number / _BINS), 3)


class TimeBudget:
    """Says for each batch whether there is time to adapt to it.

    Args:
        max_ms: Mean time per frame that predictions and updates may take, in ms.
        realtime: Adapt only while the stream's own time has not run ahead by more than a batch, or than the time
            between two frames. Where it starts again, as at the next video of a folder, so does the comparison.
        clock: Seconds, from any start.

    Raises:
        UsageError: If the time is not above 0.
    """

    def __init__(
        self, max_ms: float | None = None, realtime: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_ms is not None and not 0 < max_ms < math.inf:
            raise UsageError(f"the time per frame must be > 0 ms and finite, got {max_ms:g}")
        self._per_frame = None if max_ms is None else max_ms / 1000
        self._realtime, self._clock = realtime, clock
        self._warned = False
        self._credit = 0.0
        self._expected: float | None = None  # seconds per frame of a batch that is adapted to
        self._origin = 0.0  # the clock's time at the stream's time 0
        self._latest: float | None = None  # the stream's time at the last frame

    def allows(self, batch: Sequence[DecodedFrame]) -> bool:
        """Whether to adapt to this batch.

        Raises:
            UsageError: If the stream has no time of its own, which `realtime` goes by.
        """
        in_time = not self._realtime or self._keeps_up(batch)
        if self._per_frame is None:
            return in_time
        self._credit += self._per_frame * len(batch)
        expected = 0.0 if self._expected is None else self._expected * len(batch)
        return in_time and expected <= self._credit

    def note(self, seconds: float, num_frames: int, *, adapted: bool) -> None:
        """What a batch took."""
        if self._per_frame and not adapted and seconds > 2 * self._per_frame * num_frames and not self._warned:
            self._warned = True
            _log.warning(
                "predictions alone take %.1f ms per frame, which is over --max-ms %g: adaptation stops",
                1000 * seconds / num_frames,
                1000 * self._per_frame,
            )
        if adapted:
            new = seconds / num_frames
            self._expected = new if self._expected is None else (1 - _MEMORY) * self._expected + _MEMORY * new
        # Neither a long wait nor one slow batch is to decide about many batches to come.
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
