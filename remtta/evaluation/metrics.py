"""Metrics over prediction rows; every number of a table comes from `predictions.jsonl` by these."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ECE_BINS = 15
TOP = 5

_ARRAY_ROW = re.compile(r".*\[(\d+)\]")


@dataclass
class Tally:
    """Outcomes of a set of predictions, collected row by row."""

    correct: list[bool] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)
    truths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    entropies: list[list[float]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one prediction row."""
        self.correct.append(row["class"] == row["label_true"])
        self.probs.append(row["prob"])
        self.classes.append(row["class"])
        self.truths.append(row["label_true"])
        self.indices.append(row["index"])
        self.images.append(sys.intern(image_name(row["source"])))  # the same few in every run
        if "rank_true" in row:  # not in rows of version 0.1.0
            self.ranks.append(row["rank_true"])
        if "tvd" in row:
            self.distances.append(row["tvd"])
            self.entropies.append(row["entropies"])

    def __len__(self) -> int:
        return len(self.correct)

    @property
    def error(self) -> float:
        """Error in percent."""
        return 100 * self.correct.count(False) / len(self.correct)

    @property
    def top5_error(self) -> float | None:
        """Images in percent whose class is not among the five likeliest, where all rows tell its rank."""
        beyond = sum(rank > TOP for rank in self.ranks)
        return 100 * beyond / len(self) if len(self.ranks) == len(self) else None

    def merged(self, others: Iterable[Tally]) -> Tally:
        """This tally and others together."""
        together = Tally()
        for each in (self, *others):
            for name in vars(together):
                getattr(together, name).extend(getattr(each, name))
        return together

    def summary(self) -> dict[str, Any]:
        """All metrics of these predictions.

        Returns:
            images; error in percent, and top5_error; ece in [0, 1]; diversity, the entropy of the
            histogram of predicted classes in nats; and, of methods with masked
            views, tvd in [0, 1] and the mean entropy per view in nats.
        """
        summary: dict[str, Any] = {
            "images": len(self),
            "error": self.error,
            **({} if self.top5_error is None else {"top5_error": self.top5_error}),
            "ece": expected_calibration_error(self.probs, self.correct),
            "diversity": diversity(self.classes),
        }
        if self.distances:
            summary["tvd"] = float(np.mean(self.distances))
            summary["entropies"] = np.mean(self.entropies, axis=0).tolist()
        return summary


def image_name(source: str) -> str:
    """The same for all corruptions of an image: class folder and file name, or the row of an array."""
    row = _ARRAY_ROW.fullmatch(source)
    return row[1] if row else "/".join(source.replace("\\", "/").rsplit("/", 2)[-2:])


def calibration_bins(probs: Sequence[float], correct: Sequence[bool], bins: int = ECE_BINS) -> list[dict[str, float]]:
    """What a reliability diagram shows: accuracy against confidence per bin.

    Args:
        probs: Probability of the predicted class, per image.
        correct: Whether it was right, per image.
        bins: Number of equal bins, closed below and open above. Confidences
            of exactly 1 have one of their own, as in torchmetrics.

    Returns:
        place (0 to bins), images, share, confidence and accuracy of each bin that is not empty.
    """
    confidence = np.asarray(probs, dtype=np.float32)
    edges = np.linspace(0, 1, bins + 1, dtype=np.float32)
    place = np.searchsorted(edges, confidence, side="right") - 1
    right = np.asarray(correct, dtype=np.float64)
    return [
        {
            "place": number,
            "images": int(inside.sum()),
            "share": float(inside.mean()),
            "confidence": float(confidence[inside].mean(dtype=np.float64)),
            "accuracy": float(right[inside].mean()),
        }
        for number in range(bins + 1)
        if (inside := place == number).any()
    ]


def expected_calibration_error(probs: Sequence[float], correct: Sequence[bool], bins: int = ECE_BINS) -> float:
    """Mean gap between confidence and accuracy over the bins, weighted by their share; in [0, 1].

    torchmetrics' definition (`multiclass_calibration_error`, norm "l1").
    """
    parts = calibration_bins(probs, correct, bins)
    return sum(part["share"] * abs(part["accuracy"] - part["confidence"]) for part in parts)


def diversity(classes: Sequence[int]) -> float:
    """Entropy in nats of the histogram of predicted classes; near 0 when one class has taken over."""
    shares = np.unique(np.asarray(classes), return_counts=True)[1] / len(classes)
    return float(abs(-(shares * np.log(shares)).sum()))


def harmonic_mean(first: float, second: float) -> float:
    """Harmonic mean of two errors, as in the paper's forward transfer table."""
    return 2 * first * second / (first + second) if first + second else 0.0


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and sample standard deviation where there is more than one value."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None
