"""The interface of a run's viewers, which receive predicted frames with their rows; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remtta.runs.reading import Row
    from remtta.runs.summary import RunSummary
    from remtta.streams.prefetch import DecodedFrame


@dataclass(frozen=True)
class View:
    """The latest batch of a run.

    Attributes:
        frames: The frames, including unreadable ones.
        rows: Their rows.
        summary: The run's summary so far.
        guard: The guard's judgment of the adapted weights: "trust", "doubt" or "retired"; None without a guard.
    """

    frames: Sequence[DecodedFrame]
    rows: Sequence[Row]
    summary: RunSummary
    guard: str | None


Viewer = Callable[[View], None]


def answer_of(row: Row) -> str:
    """Return a row's label and probability."""
    if "error" in row:
        return "cannot be read"
    return f"{row['class'] if row['label'] is None else row['label']} {100 * row['prob']:.0f} %"


def answered_by(row: Row) -> str:
    """Return which model made a row's prediction, in a few words."""
    if row.get("answered_by") == "both":
        return f"adapted {100 * row['weight']:.0f} %, source {100 - 100 * row['weight']:.0f} %"
    return str(row.get("answered_by", "adapted"))
