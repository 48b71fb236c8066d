"""Which classes are mistaken, and for which others."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

from remtta.evaluation.metrics import Tally, counts_by
from remtta.files import write_atomically

MOST_CLASSES = 1000  # told one by one in results.json


def class_errors(tallies: Iterable[Tally]) -> dict[str, float] | None:
    """Error in percent of the images of each class, over all these predictions.

    Returns:
        By class number, ascending, of the classes that there are images of; None if they are more than 1,000.
    """
    truths, predicted, times = sum(tallies, Tally()).confusion
    numbers, images = counts_by(truths, times)
    if len(numbers) > MOST_CLASSES:
        return None
    _, right = counts_by(truths, times * (truths == predicted))
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
    counted = sum(tallies, Tally()).confusion.T.tolist()

    def write(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(["true", "predicted", "images", "true_label", "predicted_label"])
            rows.writerows([*each, *(names.get(number, "") for number in each[:2])] for each in counted)

    write_atomically(path, write)
