"""Orders of the images within a domain, by their classes: streams of runs, of few classes, or with a long tail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

_FEWEST = 50  # images of a stretch of few classes, which come again where there are fewer
_RATIO = 100.0  # of the commonest class to the rarest
_PART = 5  # a fifth of the images come in a long tail: of the commonest class nearly all

Order = Callable[[np.ndarray, np.ndarray, np.random.Generator], np.ndarray]
"""Returns positions in a domain from its labels (n,), the classes of the whole stream in random order, and a generator.
"""


def in_runs(labels: np.ndarray, _: np.ndarray, rng: np.random.Generator, *, length: int) -> np.ndarray:
    """Return every position once, in runs of at most this many images of a class, in random order."""
    by_class = [rng.permutation(np.flatnonzero(labels == number)) for number in np.unique(labels)]
    runs = [each[start : start + length] for each in by_class for start in range(0, len(each), length)]
    return np.concatenate([runs[number] for number in rng.permutation(len(runs))])


def of_classes(labels: np.ndarray, chosen: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the positions of the images of some classes, shuffled; they come again if they are fewer than 50."""
    places = np.flatnonzero(np.isin(labels, chosen))
    times = 1 if len(places) >= _FEWEST else -(-_FEWEST // len(places))
    return np.concatenate([rng.permutation(places) for _ in range(times)])[: max(_FEWEST, len(places))]


def of_few(labels: np.ndarray, classes: np.ndarray, rng: np.random.Generator, *, count: int) -> np.ndarray:
    """Return positions of images of the stream's first classes."""
    return of_classes(labels, classes[:count], rng)


def switching(labels: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return positions of shuffled images of all classes, then of as many of the stream's first class."""
    then = of_classes(labels, classes[:1], rng)
    return np.concatenate([rng.permutation(len(labels))[: len(then)], then])


def long_tail(labels: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a fifth of the positions, shuffled: the stream's first class is 100 times as likely to come as its last,
    the others between.
    """
    weights = dict(zip(classes.tolist(), _RATIO ** -np.linspace(0, 1, len(classes)), strict=True))
    each = np.array([weights.get(number, 1 / _RATIO) for number in labels.tolist()])
    return rng.choice(len(labels), -(-len(labels) // _PART), replace=False, p=each / each.sum())


NUM_CLASSES = {"one-class": 1, "two-classes": 2, "three-classes": 3, "other-classes": 2, "switch": 1}
"""Number of classes of a stretch, by order."""

NEXT_CLASSES = ("other-classes", "switch")
"""Orders in which each domain has the next classes of the stream."""

ORDERS: Mapping[str, Order] = {
    **{f"runs-{length}": partial(in_runs, length=length) for length in (5, 25, 100)},
    **{name: partial(of_few, count=count) for name, count in NUM_CLASSES.items()},
    "switch": switching,
    "long-tail": long_tail,
}
