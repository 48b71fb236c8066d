"""Time series from a run's rows and events; imports no torch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.reading import Row, printable, read_rows

MAX_FRAMES = 8  # shown per kind
_MAX_BINS = 120  # per curve


@dataclass
class Series:
    """A run over time."""

    index: array[int] = field(default_factory=lambda: array("q"))  # number of each predicted frame
    entropy: array[float] = field(default_factory=lambda: array("d"))  # entropy of its prediction, in nats
    share: array[float] = field(default_factory=lambda: array("d"))  # the adapted model's weight in it
    # (frame, estimated accuracy) wherever it changed, of the predictions and of each model.
    estimates: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # Predicted classes in the first and second half of the run; if both models predicted, those of the source and
    # of the adapted model instead.
    halves: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    by_both: bool = False  # whether `halves` holds the two models
    # Some images, not of videos, on which the two models disagreed, spread over the run.
    differing: list[Row] = field(default_factory=list)
    num_differing: int = 0  # number of frames on which they disagreed
    unsure: list[Row] = field(default_factory=list)  # the images of lowest probability
    events: list[Row] = field(default_factory=list)  # decisions, and gaps


def read_series(folder: Path, predicted: int) -> Series:
    """Read a run's rows, `predicted` of them by its description, and events; raise RemttaError if one is damaged."""
    events, path = folder / EVENTS, folder / PREDICTIONS
    series = Series(events=list(read_rows(events)) if events.is_file() else [])
    if path.is_file():
        stills = (row for row in _added(series, path, predicted) if "frame" not in row)
        series.unsure = nsmallest(MAX_FRAMES, stills, key=lambda row: row["prob"])
        if series.num_differing:
            differing = (row for row in _predicted(path) if _differ(row) and "frame" not in row)
            step = max(1, series.num_differing // MAX_FRAMES)
            series.differing = list(islice(differing, 0, step * MAX_FRAMES, step))
    return series


def _added(series: Series, path: Path, predicted: int) -> Iterator[Row]:
    """Yield the rows of predicted frames while adding them to the series; at the end, set its `halves`."""
    models: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for number, row in enumerate(_predicted(path)):
        series.index.append(row["index"])
        series.entropy.append(row["entropy"])
        series.share.append(0.0 if row.get("answered_by") == "source" else row.get("weight", 1.0))
        for name, estimate in (row.get("estimate") or {}).items():
            points = series.estimates.setdefault(name, [])
            if not points or points[-1][1] != estimate:
                points.append((row["index"], estimate))
        series.num_differing += _differ(row)
        series.by_both |= "each" in row or "weight" in row
        series.halves[2 * number >= predicted][name_of(row)] += 1
        own: Row = row.get("raw", row)
        for counts, who in zip(models, ("source", "adapted"), strict=True):
            counts[name_of((row.get("each") or {}).get(who, own))] += 1
        yield row
    if series.by_both:
        series.halves = models


def binned(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return positions from 0 to 1 and means of a series in a few bins of equal length."""
    parts = np.array_split(np.asarray(values, dtype=np.float64), min(_MAX_BINS, len(values)))
    ends = np.cumsum([len(part) for part in parts])
    places = (ends - [len(part) / 2 for part in parts]) / len(values)
    return places, np.array([part.mean() for part in parts])


def name_of(row: Row) -> str:
    """Return the label of a row's class, printable, or its number."""
    return printable(str(row.get("label") or row["class"]))


def _predicted(path: Path) -> Iterator[Row]:
    return (row for row in read_rows(path) if "error" not in row and "gap" not in row)


def _differ(row: Row) -> bool:
    """Return whether the models disagree; older runs recorded both even where they agreed."""
    each = row.get("each") or {}
    return {"adapted", "source"} <= each.keys() and each["adapted"]["class"] != each["source"]["class"]
