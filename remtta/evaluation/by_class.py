"""Which classes are mistaken, and for which others."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from remtta.evaluation.metrics import Tally
from remtta.files import write_atomically

MOST_CLASSES = 1000  # told one by one in results.json


def class_errors(tallies: Iterable[Tally]) -> dict[str, float] | None:
    """Error in percent of the images of each class, over all these predictions.

    Returns:
        By class number, ascending, of the classes that there are images of; None if they are more than 1,000.
    """
    together = Tally().merged(tallies)
    numbers, positions, images = np.unique(together.truths, return_inverse=True, return_counts=True)
    if len(numbers) > MOST_CLASSES:
        return None
    right = np.bincount(positions, together.correct, minlength=len(numbers))
    errors = 100 * (1 - right / images)
    return {str(number): float(error) for number, error in zip(numbers.tolist(), errors, strict=True)}


def write_confusion(path: Path, tallies: Iterable[Tally], names: Mapping[int, str]) -> None:
    """Write how many images of which class were taken for which: the entries of the matrix that are not zero.

    Args:
        path: The CSV file.
        tallies: Predictions, which are counted together.
        names: Of the classes, by number, where they have any.

    Raises:
        OutputError: If the disk refuses.
    """
    together = Tally().merged(tallies)
    pairs, counts = np.unique(np.stack([together.truths, together.classes]), axis=1, return_counts=True)
    columns = zip(*pairs.tolist(), counts.tolist(), strict=True)

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["true", "predicted", "images", "true_label", "predicted_label"])
            rows.writerows([*each, *(names.get(number, "") for number in each[:2])] for each in columns)

    write_atomically(path, write)
