"""Where a stream changed, by the mean logits of its batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from remtta.runs.reading import Row

_WINDOW = 100  # frames compared on each side
_MIN_BATCHES, _MIN_ON_SIDE = 12, 3
_NOISE_QUANTILE = 0.9  # larger differences of successive batches are no noise, but may be changes
_RIDGE = 0.1  # share of the mean variance that is added to each
_THRESHOLD, _TIMES_MEDIAN = 5.0, 2.0
_MOST = 8


def find_changes(batches: Sequence[Row]) -> list[tuple[int, int]]:
    """Return the last frame before each change of a stream and one surely after it, of the clearest ones, in order.

    Between the batches of 100 frames before a point and those after it, the squared distance of the means is measured
    in units of the noise, as in Hotelling's test. It is about 1 where nothing changes, and counts from 5, and twice
    the median of the run, on; that is more where the content varies slowly, as on video.

    Args:
        batches: Rows of `batches.jsonl`.
    """
    batches = [batch for batch in batches if "sketch" in batch]
    if len(batches) < _MIN_BATCHES:
        return []
    means = np.array([batch["sketch"] for batch in batches], dtype=np.float64)
    size = max(_MIN_ON_SIDE, math.ceil(_WINDOW / float(np.median([batch["frames"] for batch in batches]))))
    distance = _distances(means, size)
    limit = max(_THRESHOLD, _TIMES_MEDIAN * float(np.median(distance))) if len(distance) else math.inf
    found: list[int] = []
    for place in np.argsort(-distance):
        if distance[place] < limit or len(found) == _MOST:
            break
        if all(abs(place - other) >= size for other in found):
            found.append(int(place))
    return [(batches[place + size]["frame"] - 1, batches[place + size + 1]["frame"]) for place in sorted(found)]


def _distances(means: np.ndarray, size: int) -> np.ndarray:
    """Return the distance of the mean of `size` batches before from that of as many after each inner batch."""
    steps = np.diff(means, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    noise = steps[lengths <= np.quantile(lengths, _NOISE_QUANTILE)]
    covariance = noise.T @ noise / len(noise) / 2
    dimensions = means.shape[1]
    covariance += np.eye(dimensions) * (_RIDGE * np.trace(covariance) / dimensions + np.finfo(np.float64).tiny)
    sums = np.concatenate([np.zeros((1, dimensions)), means.cumsum(axis=0)])
    blocks = (sums[size:] - sums[:-size]) / size
    change = blocks[size:] - blocks[:-size]
    squared: np.ndarray = (change * np.linalg.solve(covariance, change.T).T).sum(1)
    return squared * size / 2 / dimensions
