"""Standard errors that come from the number of images: what other images of the same kind would change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from remtta.evaluation.metrics import Tally

WITHIN = 2
"""Standard errors up to which a difference is told as none: about 95 % of those that are none stay below."""

Outcomes = Mapping[str, Tally]
"""A run's predictions by domain."""

_Part = tuple[np.ndarray, Sequence[str]]


def same_in_every_severity(names: Sequence[str]) -> list[str]:
    """Rows of an array, where severities come one after the other, counted from the first row of their severity."""
    if not all(map(str.isdecimal, names)):
        return list(names)
    first = min(map(int, names), default=0)
    return [str(int(name) - first) for name in names]


def standard_error(runs: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Standard error, in percentage points, of the mean error over runs and domains.

    With E the mean of the P errors of all runs and domains, and n images in each, image i moves E by
    u_i = sum of (wrong - error) / (P n) over its predictions. The standard error is sqrt(sum of u_i^2): in one domain
    of one run that is the binomial sqrt(p (1 - p) / n). An image counts once, however many runs, visits and
    corruptions there are of it, as these are often right or wrong together.

    Args:
        runs: Those of a method, one per seed, on the same images.
        domains: Which ones.
    """
    tallies = [run[domain] for domain in domains for run in runs]
    parts = [(_wrong(tally) - tally.error / 100, tally.images) for tally in tallies]
    return _root_of_squares(parts)


def paired_standard_error(firsts: Sequence[Outcomes], seconds: Sequence[Outcomes], domains: Iterable[str]) -> float:
    """Standard error, in percentage points, of the difference of two methods' mean errors on the same images.

    As `standard_error`, with u_i = sum of (first wrong - second wrong) / (P n), so what both get right or wrong falls
    out. In one domain of one run, where b images only the first gets wrong and c only the second, that is McNemar's
    sqrt(b + c) / n, the error if there were no difference.

    Args:
        firsts: Runs of a method, one per seed.
        seconds: Those of the other, with the same seeds.
        domains: Which ones.
    """
    return _root_of_squares(
        [
            _differences(first[domain], second[domain])
            for domain in domains
            for first, second in zip(firsts, seconds, strict=True)
        ]
    )


def _wrong(tally: Tally) -> np.ndarray:
    return ~np.asarray(tally.correct, dtype=bool) * 1.0


def _differences(first: Tally, second: Tally) -> _Part:
    """First minus second wrong for each image that both were asked about."""
    if first.indices == second.indices:
        return _wrong(first) - _wrong(second), second.images
    _, left, right = np.intersect1d(first.indices, second.indices, assume_unique=True, return_indices=True)
    return _wrong(first)[left] - _wrong(second)[right], [second.images[place] for place in right]


def _root_of_squares(parts: Sequence[_Part]) -> float:
    numbers: dict[str, int] = {}
    of_image = [[numbers.setdefault(name, len(numbers)) for name in names] for _, names in parts]
    weighted = [values / (len(parts) * max(1, len(values))) for values, _ in parts]
    moves = np.bincount(np.concatenate(of_image).astype(int), np.concatenate(weighted))
    return 100 * float(np.sqrt((moves**2).sum()))
