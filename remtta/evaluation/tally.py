"""Count outcomes from prediction rows; every number in the tables derives from these counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from remtta.runs.reading import Row, read_rows

ECE_BINS = 15
TOP = 5

_ROWS_AT_ONCE = 4000
_EDGES = np.linspace(0, 1, ECE_BINS + 1, dtype=np.float32)
_ARRAY_ROW = re.compile(r".*\.npy\[(\d+)\]")
_PREDICTED = 2**32 - 1


@dataclass
class Tally:
    """Counts of predictions; memory grows with images and classes, not with predictions.

    Attributes:
        num_predictions: Number of predictions by image number.
        wrong: Number of wrong predictions by image number.
        pairs: Pairs of a true and a predicted class, as 2**32 * true + predicted, ascending.
        times: Number of occurrences of each pair.
        bins: For each calibration bin, the number of predictions, the sum of their confidences, and the number of
            correct ones. Bins are of equal width, closed below and open above; confidences of exactly 1 have a bin of
            their own, as in torchmetrics.
        beyond: Number of rows whose true class is not among the top five, in an array of one.
        distances: Number of rows with masked views, and the sum of their distances from the plain view.
        entropies: The sum of the entropies of each view.
    """

    num_predictions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    wrong: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    pairs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    times: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    bins: np.ndarray = field(default_factory=lambda: np.zeros((ECE_BINS + 1, 3)))
    beyond: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    distances: np.ndarray = field(default_factory=lambda: np.zeros(2))
    entropies: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], numbers: dict[str, int], *, by_path: bool = False) -> Tally:
        """Count prediction rows.

        Args:
            numbers: Image numbers by name; new images get the next number.
            by_path: Whether images are named by their whole paths.
        """
        truths, predicted = (np.array([row[name] for row in rows], np.int64) for name in ("label_true", "class"))
        images = [_image_number(row["source"], numbers, by_path) for row in rows]
        pairs, times = np.unique((truths << 32) + predicted, return_counts=True)
        confidence, right = np.array([row["prob"] for row in rows], np.float32), truths == predicted
        places = np.searchsorted(_EDGES, confidence, side="right") - 1
        viewed = [row for row in rows if "tvd" in row]
        return cls(
            num_predictions=np.bincount(images).astype(np.int32),
            wrong=np.bincount(images, ~right).astype(np.int32),
            pairs=pairs,
            times=times,
            bins=np.stack([np.bincount(places, each, ECE_BINS + 1) for each in (None, confidence, right)], axis=1),
            beyond=np.array([sum(row["rank_true"] > TOP for row in rows)]),
            distances=np.array([len(viewed), sum(row["tvd"] for row in viewed)]),
            entropies=np.array([sum(view) for view in zip(*(row["entropies"] for row in viewed), strict=True)]),
        )

    def __add__(self, other: Tally) -> Tally:
        total = Tally(
            **{each.name: padded_sum([vars(tally)[each.name] for tally in (self, other)]) for each in fields(self)}
        )
        total.pairs, places = np.unique(np.concatenate([self.pairs, other.pairs]), return_inverse=True)
        total.times = np.bincount(places, np.concatenate([self.times, other.times])).astype(np.int64)
        return total

    def renumber_from_first(self) -> None:
        """Renumber images from the first one present: an array holds its severities in sequence."""
        first = np.flatnonzero(self.num_predictions)[0]
        self.num_predictions, self.wrong = self.num_predictions[first:], self.wrong[first:]

    def __len__(self) -> int:
        return int(self.times.sum())

    @property
    def error(self) -> float:
        """Error in percent."""
        return 100 * int(self.wrong.sum()) / len(self)

    @property
    def top5_error(self) -> float:
        """Top-5 error in percent."""
        return 100 * int(self.beyond[0]) / len(self)

    @property
    def confusion(self) -> np.ndarray:
        """True class, predicted class and count, shape (3, N), ascending."""
        return np.stack([self.pairs >> 32, self.pairs & _PREDICTED, self.times])

    def reliability(self) -> np.ndarray:
        """Return index (0 to 15), images, mean confidence and accuracy of each nonempty bin, shape (4, N)."""
        places = np.flatnonzero(self.bins[:, 0])
        images, confidence, right = self.bins[places].T
        return np.stack([places, images, confidence / images, right / images])

    @property
    def calibration_error(self) -> float:
        """Expected calibration error: mean gap between confidence and accuracy, weighted by bin size; in [0, 1].

        Follows torchmetrics (`multiclass_calibration_error`, norm "l1").
        """
        _, images, confidence, accuracy = self.reliability()
        return float((images / len(self) * abs(accuracy - confidence)).sum())

    def summary(self) -> dict[str, Any]:
        """Return all metrics of these predictions.

        These are images; error in percent, and top5_error; ece in [0, 1]; diversity, the entropy of the histogram of
        predicted classes in nats; and, with masked views, tvd in [0, 1] and the mean entropy per view in nats.
        """
        _, predicted, times = self.confusion
        summary: dict[str, Any] = {
            "images": len(self),
            "error": self.error,
            "top5_error": self.top5_error,
            "ece": self.calibration_error,
            "diversity": diversity(counts_by(predicted, times)[1]),
        }
        viewed, distance = self.distances.tolist()
        if viewed:
            summary["tvd"] = distance / viewed
            summary["entropies"] = (self.entropies / viewed).tolist()
        return summary


Tallies = dict[tuple[str, int], dict[str, dict[tuple[str, int | None], Tally]]]
"""By method and seed, then phase, then name and severity of the domain."""


def tally_rows(path: Path, *, by_path: bool = False) -> Tallies:
    """Count the outcomes in a file of rows, reading it in chunks.

    Images with the same `image_name` count as one image under several corruptions, unless `by_path`.
    """
    tallies: Tallies = {}
    numbers: dict[str, int] = {}
    rows = (row for row in read_rows(path) if "error" not in row)
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        apart: dict[tuple[Any, ...], list[Row]] = {}
        for row in chunk:
            key = row["method"], row["seed"], row["phase"], row["domain"], row.get("severity")
            apart.setdefault(key, []).append(row)
        for (method, seed, phase, *place), own in apart.items():
            places = tallies.setdefault((method, seed), {}).setdefault(phase, {})
            places[tuple(place)] = places.get(tuple(place), Tally()) + Tally.of(own, numbers, by_path=by_path)
    if not numbers:
        for tally in (tally for phases in tallies.values() for places in phases.values() for tally in places.values()):
            tally.renumber_from_first()
    return tallies


def tally_of(tallies: Tallies, method: str) -> Tally:
    """Return the sum of a method's outcomes in the adapt phase."""
    own = (phases["adapt"].values() for (name, _), phases in tallies.items() if name == method)
    return sum((tally for places in own for tally in places), Tally())


def errors_by_round(path: Path, num_domains: int) -> dict[str, list[float]]:
    """Return the error in percent of each method in each round through all its domains, over all images and seeds."""
    counts: Counter[tuple[str, int, bool]] = Counter()
    for row in read_rows(path):
        if "error" not in row and row["phase"] == "adapt":
            counts[row["method"], row["visit"] // num_domains, row["class"] == row["label_true"]] += 1
    errors: dict[str, list[float]] = {}
    for method, number in sorted({key[:2] for key in counts}):
        right, wrong = (counts[method, number, is_right] for is_right in (True, False))
        errors.setdefault(method, []).append(100 * wrong / (right + wrong))
    return errors


def counts_by(classes: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct classes, ascending, and the count of each."""
    numbers, places = np.unique(classes, return_inverse=True)
    return numbers, np.bincount(places, times)


def padded_sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, with shorter ones padded by zeros."""
    total = np.zeros_like(max(parts, key=len))
    for part in parts:
        total[: len(part)] += part
    return total


def image_name(source: str) -> str:
    """Return a name shared by all corruptions of an image file: its class folder and file name."""
    return "/".join(source.replace("\\", "/").rsplit("/", 2)[-2:])


def _image_number(source: str, numbers: dict[str, int], by_path: bool) -> int:
    row = _ARRAY_ROW.fullmatch(source)
    return int(row[1]) if row else numbers.setdefault(source if by_path else image_name(source), len(numbers))


def diversity(counts: np.ndarray) -> float:
    """Return the entropy in nats of the histogram of predicted classes; near 0 if one class dominates."""
    shares = counts / counts.sum()
    return float(abs(-(shares * np.log(shares)).sum()))


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and the sample standard deviation or None for a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
