"""What an evaluation keeps on the disk as it goes: rows, events, and how far it has come, from which it goes on."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.errors import UsageError
from remtta.runs.batch import Counts
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.reading import read_rows
from remtta.runs.saving import SaveRhythm
from remtta.runs.session import Moment
from remtta.runs.states import load_state, other_version, save_state
from remtta.runs.writer import RowWriter

PROGRESS = ".progress.safetensors"
DELTAS, PLOTS = "deltas", "plots"


def delta_path(folder: Path, method: str, seed: int | str) -> Path:
    """Where an evaluation keeps a trial's delta."""
    return folder / DELTAS / f"{method}_seed{seed}.safetensors"


@dataclass
class Position(Counts):
    """Where a trial is: all that is before it is in `predictions.jsonl` and in the method's state.

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
    """How far an evaluation has come: with the method's state, one file, replaced as a whole.

    Attributes:
        finished: Records of the trials that are done, in order.
        position: Where the current trial is.
        num_bytes: Size of `predictions.jsonl` at this point.
        rows_sha256: Hash of so much of it.
        event_bytes: Size of `events.jsonl`.
    """

    finished: list[dict[str, Any]] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    num_bytes: int = 0
    rows_sha256: str | None = None
    event_bytes: int = 0

    def save(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        """Write it with the method's state.

        Raises:
            OutputError: If the disk refuses.
        """
        save_state(folder / PROGRESS, asdict(self), state)

    @classmethod
    def load(cls, folder: Path) -> tuple[Progress, dict[str, Tensor]]:
        """Read what `save` wrote; the very start if nothing was written yet.

        Raises:
            UsageError: If the file is damaged or of another version.
            RemttaError: If it cannot be read.
        """
        path = folder / PROGRESS
        if not path.is_file():
            return cls(), {}
        content, state = load_state(path)
        position: Any = content.get("position")
        if not (_fits(content, cls) and _fits(position, Position)):
            raise other_version(path)
        return cls(**{**content, "position": Position(**position)}), state

    @classmethod
    def of_completed(cls, folder: Path, results: Mapping[str, Any]) -> Progress:
        """How far an evaluation with these results has come, so that methods can be added to it.

        Raises:
            UsageError: If it lacks some of its rows, or has others.
        """
        finished = [seed for content in results["methods"].values() for seed in content["seeds"].values()]
        rows, events = folder / PREDICTIONS, folder / EVENTS
        counts = Counter((row["method"], row["seed"]) for row in read_rows(rows)) if rows.exists() else Counter()
        if counts != {(trial["method"], trial["seed"]): trial["images"] + trial["skipped"] for trial in finished}:
            raise UsageError(f"{rows} no longer holds the evaluation's rows; start again with --overwrite")
        event_bytes = events.stat().st_size if events.exists() else 0
        return cls(finished, num_bytes=rows.stat().st_size, event_bytes=event_bytes)


def _fits(content: Any, kind: type[Progress] | type[Position]) -> bool:
    return isinstance(content, dict) and set(content) == {entry.name for entry in fields(kind)}


class Ledger(contextlib.ExitStack):
    """Writes rows and events, and the place from which an evaluation can go on; a context manager.

    `eventful` is an evaluation with guards that may decide anything.

    Raises:
        OutputError: If the files cannot be written.
    """

    def __init__(self, folder: Path, progress: Progress, *, save_every_s: float, eventful: bool) -> None:
        super().__init__()
        self.folder, self.progress = folder, progress
        self._save_every_s, self._rhythm = save_every_s, SaveRhythm()
        rows = RowWriter(folder / PREDICTIONS, keep_bytes=progress.num_bytes, kept_sha256=progress.rows_sha256)
        self._rows = self.enter_context(rows)
        self._events: RowWriter | None = None
        if eventful:
            path = folder / EVENTS
            kept = progress.event_bytes if path.exists() else 0  # decisions that somebody deleted are only reported
            self._events = self.enter_context(RowWriter(path, keep_bytes=kept))

    def write(self, rows: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> None:
        """Write what came of a batch.

        Raises:
            OutputError: If the disk refuses.
        """
        self._rows.write(rows)
        if self._events:
            self._events.write(events)

    @property
    def save_is_due(self) -> bool:
        """Whether it is time to save again."""
        return self._rhythm.allows(self._save_every_s)

    def save(self, moment: Moment[Position] | None) -> None:
        """Save how far it has come, so that it can go on from this moment; without one, what was saved stays.

        Raises:
            OutputError: If the disk refuses.
        """
        if moment is None:
            return
        self.progress.num_bytes, self.progress.rows_sha256 = self._rows.sync(), self._rows.sha256
        self.progress.event_bytes = self._events.sync() if self._events else 0
        with self._rhythm.timed():
            replace(self.progress, position=moment.counts).save(self.folder, moment.state)

    def finish(self, trial: dict[str, Any]) -> None:
        """Take the record of a trial that is done, and save that the next one has not begun.

        Raises:
            OutputError: If the disk refuses.
        """
        self.progress.finished.append(trial)
        self.progress.position = Position()
        self.save(Moment(self.progress.position, {}))
