"""How far an evaluation has come: one file, replaced as a whole, from which it goes on after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.runs.batch import Counts
from remtta.runs.states import load_state, other_version, save_state


@dataclass
class Position(Counts):
    """Where a run is: all that is before it is in `predictions.jsonl` and in the method's state.

    Attributes:
        visit: Number of the visit.
        start: Images of it that are done.
        skip: Batches that the time-constrained scenario still only predicts.
        cost_ratio: The ratio that scenario goes by.
        adapted: Images that entered an update.
        seconds: Time spent in the method.
        peak_bytes: Most memory so far.

    The others are those of `Counts`.
    """

    visit: int = 0
    start: int = 0
    skip: int = 0
    cost_ratio: float | None = None
    adapted: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


@dataclass
class Progress:
    """Everything an evaluation needs to go on.

    Attributes:
        finished: Records of the runs that are done, in order.
        position: Where the current run is.
        num_bytes: Size of `predictions.jsonl` at this point.
        rows_sha256: Hash of so much of it.
        event_bytes: Size of `events.jsonl`.
    """

    finished: list[dict[str, Any]] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    num_bytes: int = 0
    rows_sha256: str | None = None
    event_bytes: int = 0


def save_progress(path: Path, progress: Progress, state: Mapping[str, Tensor]) -> None:
    """Write progress and the method's state atomically.

    Raises:
        OutputError: If the disk refuses.
    """
    save_state(path, asdict(progress), state)


def load_progress(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Read what `save_progress` wrote; the very start if nothing was written yet.

    Raises:
        UsageError: If the file is damaged or of another version.
        RemttaError: If it cannot be read.
    """
    if not path.is_file():
        return Progress(), {}
    content, state = load_state(path)
    position: Any = content.get("position")
    if not (_fits(content, Progress) and _fits(position, Position)):
        raise other_version(path)
    return Progress(**{**content, "position": Position(**position)}), state


def _fits(content: Any, kind: type[Progress] | type[Position]) -> bool:
    return isinstance(content, dict) and set(content) == {entry.name for entry in fields(kind)}
