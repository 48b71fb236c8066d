"""Histograms of latencies."""

from __future__ import annotations

import math
from bisect import bisect, bisect_left
from collections.abc import Sequence
from itertools import accumulate

_SHORTEST_S, _LONGEST_S, _BINS = 1e-4, 1e4, 512  # range of latencies, on a logarithmic scale: exact to within 4 %
_EDGES_S = [_SHORTEST_S * math.pow(_LONGEST_S / _SHORTEST_S, number / _BINS) for number in range(1, _BINS + 1)]


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
