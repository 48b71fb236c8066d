"""The files that an evaluation writes as it goes: rows, events, and how far it has come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.evaluation.progress import Position, Progress, save_progress
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.saving import SaveRhythm
from remtta.runs.session import Moment
from remtta.runs.writer import RowWriter

PROGRESS = ".progress.safetensors"


class Ledger(contextlib.ExitStack):
    """Rows and events, with the place from which an evaluation can go on; a context manager.

    Args:
        folder: The evaluation's folder.
        progress: How far it has come.
        save_every_s: Seconds between two saves of the progress.
        eventful: Whether there are guards to decide anything.

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
        if moment is not None:
            self._save(moment.counts, moment.state)

    def save_finished(self) -> None:
        """Save that a run is done, and the next one has not begun.

        Raises:
            OutputError: If the disk refuses.
        """
        self._save(self.progress.position, {})

    def _save(self, position: Position, state: Mapping[str, Tensor]) -> None:
        self.progress.num_bytes, self.progress.rows_sha256 = self._rows.sync(), self._rows.sha256
        self.progress.event_bytes = self._events.sync() if self._events else 0
        with self._rhythm.timed():
            save_progress(self.folder / PROGRESS, replace(self.progress, position=position), state)
