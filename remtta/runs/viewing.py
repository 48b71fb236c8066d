"""Who looks on at a run gets each frame that was predicted, with its row; imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remtta.runs.reading import Row
    from remtta.runs.summary import RunSummary
    from remtta.streams.prefetch import DecodedFrame


@dataclass(frozen=True)
class View:
    """What a run has just predicted.

    Attributes:
        frames: The frames, unreadable ones included.
        rows: What was written down of each.
        summary: What the run has come to.
        guard: What the guard thinks of the adapted weights: "trust", "doubt" or "retired"; None without one.
    """

    frames: Sequence[DecodedFrame]
    rows: Sequence[Row]
    summary: RunSummary
    guard: str | None


Viewer = Callable[[View], None]


def answer_of(row: Row) -> str:
    """A row's label and probability."""
    if "error" in row:
        return "cannot be read"
    return f"{label_of(row)} {100 * row['prob']:.0f} %"


def label_of(row: dict[str, Any]) -> str:
    """A row's label, or its class where the model has no names."""
    return str(row["class"] if row["label"] is None else row["label"])


def answered_by(row: Row) -> str:
    """Who gave a row's answer, in a few words."""
    if row.get("answered_by") == "both":
        return f"adapted {100 * row['weight']:.0f} %, source {100 - 100 * row['weight']:.0f} %"
    return str(row.get("answered_by", "adapted"))
