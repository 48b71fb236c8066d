"""Standard errors that come from the number of images: what other images of the same kind would change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from remtta.evaluation.metrics import Tally, padded_sum

WITHIN = 2
"""Standard errors up to which a difference is told as none: about 95 % of those that are none stay below."""

Outcomes = Mapping[str, Tally]
"""A run's predictions by domain."""


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
    return _root_of_squares([(tally.wrong - tally.asked * (tally.error / 100), len(tally)) for tally in tallies])


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


def _differences(first: Tally, second: Tally) -> tuple[np.ndarray, int]:
    """First minus second wrong, by image, and how many predictions both have; of some, one may lack a few."""
    size = min(len(first.asked), len(second.asked))
    asked = np.minimum(first.asked[:size], second.asked[:size])
    share = [tally.wrong[:size] / np.maximum(1, tally.asked[:size]) for tally in (first, second)]
    return asked * (share[0] - share[1]), int(asked.sum())


def _root_of_squares(parts: Sequence[tuple[np.ndarray, int]]) -> float:
    """From what each image moves the sum of a part's outcomes by, and how many outcomes it has."""
    moves = padded_sum([moves / (len(parts) * max(1, count)) for moves, count in parts])
    return 100 * float(np.sqrt((moves**2).sum()))
