"""Count outcomes from prediction rows; every number in the tables derives from these counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from remtta.runs.reading import Row, read_rows

ECE_BINS = 15
TOP = 5
FIRST = 50  # images of a condition, on which a method has hardly adapted to it

_ROWS_AT_ONCE = 4000
_EDGES = np.linspace(0, 1, ECE_BINS + 1, dtype=np.float32)
_ARRAY_ROW = re.compile(r".*\.npy\[(\d+)\]")


@dataclass
class Tally:
    """Counts of predictions; memory grows with images and classes, not with predictions."""

    num_predictions: np.ndarray  # predictions of each image, by image number
    wrong: np.ndarray  # wrong ones of these
    class_sums: np.ndarray  # sum of the class numbers that were predicted for each image
    num_true: np.ndarray  # images of each class, by class number
    num_right: np.ndarray  # those of these that were predicted correctly
    num_predicted: np.ndarray  # predictions of each class
    # For each calibration bin, the number of predictions, the sum of their confidences, and the number of correct ones.
    # Bins are of equal width, closed below and open above; as in torchmetrics, confidences of exactly 1 have their own.
    bins: np.ndarray
    outside_top5: np.ndarray  # number of rows whose true class is not among the top five, in an array of one
    view_distances: np.ndarray  # number of rows with masked views, and the sum of their distances from the plain view
    view_entropies: np.ndarray  # sum of the entropies of each view

    @classmethod
    def of(cls, rows: Sequence[Row], image_numbers: dict[str, int], *, by_path: bool = False) -> Tally:
        """Count prediction rows.

        Args:
            image_numbers: Image numbers by name; new images get the next number.
            by_path: Whether images are named by their whole paths.
        """
        true, predicted = (np.array([row[name] for row in rows], np.int64) for name in ("label_true", "class"))
        images = [_image_number(row["source"], image_numbers, by_path) for row in rows]
        confidence, right = np.array([row["prob"] for row in rows], np.float32), true == predicted
        bins = np.searchsorted(_EDGES, confidence, side="right") - 1
        masked = [row for row in rows if "tvd" in row]
        return cls(
            num_predictions=np.bincount(images).astype(np.int32),
            wrong=np.bincount(images, ~right).astype(np.int32),
            class_sums=np.bincount(images, predicted).astype(np.int64),
            num_true=np.bincount(true),
            num_right=np.bincount(true[right]),
            num_predicted=np.bincount(predicted),
            bins=np.stack([np.bincount(bins, weights, ECE_BINS + 1) for weights in (None, confidence, right)], axis=1),
            outside_top5=np.array([sum(row["rank_true"] > TOP for row in rows)]),
            view_distances=np.array([len(masked), sum(row["tvd"] for row in masked)]),
            view_entropies=np.array([sum(view) for view in zip(*(row["entropies"] for row in masked), strict=True)]),
        )

    @classmethod
    def total(cls, tallies: Iterable[Tally]) -> Tally:
        """Return the sum of tallies, of which there must be one."""
        return cls(*map(padded_sum, zip(*(vars(tally).values() for tally in tallies), strict=True)))

    def __len__(self) -> int:
        return int(self.num_true.sum())

    @property
    def error(self) -> float:
        """Error in percent."""
        return 100 * int(self.wrong.sum()) / len(self)

    def reliability(self) -> np.ndarray:
        """Return index (0 to 15), images, mean confidence and accuracy of each nonempty bin, shape (4, N)."""
        numbers = np.flatnonzero(self.bins[:, 0])
        images, confidence, right = self.bins[numbers].T
        return np.stack([numbers, images, confidence / images, right / images])

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
        summary: dict[str, Any] = {
            "images": len(self),
            "error": self.error,
            "top5_error": 100 * int(self.outside_top5[0]) / len(self),
            "ece": self.calibration_error,
            "diversity": diversity(self.num_predicted),
        }
        num_masked, distance = self.view_distances.tolist()
        if num_masked:
            summary |= {"tvd": distance / num_masked, "entropies": (self.view_entropies / num_masked).tolist()}
        return summary


class TallyKey(NamedTuple):
    """The rows that a tally counts."""

    method: str
    seed: int
    phase: str
    domain: str
    severity: int | None


Tallies = dict[TallyKey, Tally]


def tally_rows(path: Path, *, by_path: bool = False) -> Tallies:
    """Count the outcomes in a file of rows, reading it in chunks; the first images of a condition also on their own, in
    the phase "first".

    Images with the same `image_name` count as one image under several corruptions, unless `by_path`.
    """
    tallies: Tallies = {}
    image_numbers: dict[str, int] = {}
    rows = (row for row in read_rows(path) if "error" not in row)
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        groups: dict[TallyKey, list[Row]] = {}
        for row in chunk:
            key = TallyKey(row["method"], row["seed"], row["phase"], row["domain"], row.get("severity"))
            groups.setdefault(key, []).append(row)
        for key, group in list(groups.items()):
            seen = len(tallies[key]) if key in tallies else 0
            if key.phase == "adapt" and seen < FIRST:
                groups[key._replace(phase="first")] = group[: FIRST - seen]
        for key, group in groups.items():
            tally = Tally.of(group, image_numbers, by_path=by_path)
            tallies[key] = Tally.total([tallies[key], tally]) if key in tallies else tally
    if not image_numbers:  # an array holds its severities in sequence: count its rows from the first one of each
        starts = {key: np.flatnonzero(tally.num_predictions)[0] for key, tally in tallies.items()}
        for key, tally in tallies.items():
            first = starts[key._replace(phase="adapt") if key.phase == "first" else key]
            for name in ("num_predictions", "wrong", "class_sums"):
                setattr(tally, name, getattr(tally, name)[first:])
    return tallies


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


def padded_sum(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays, with shorter ones padded by zeros."""
    total = np.zeros_like(max(arrays, key=len))
    for array in arrays:
        total[: len(array)] += array
    return total


def image_name(source: str) -> str:
    """Return a name shared by all corruptions of an image file: its class folder and file name."""
    return "/".join(source.replace("\\", "/").rsplit("/", 2)[-2:])


def _image_number(source: str, numbers: dict[str, int], by_path: bool) -> int:
    row = _ARRAY_ROW.fullmatch(source)
    return int(row[1]) if row else numbers.setdefault(source if by_path else image_name(source), len(numbers))


def diversity(counts: np.ndarray) -> float:
    """Return the entropy in nats of a histogram of predicted classes; near 0 if one class dominates."""
    shares = counts[counts > 0] / counts.sum()
    return float(abs(-(shares * np.log(shares)).sum()))


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean, and the sample standard deviation or None for a single value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
