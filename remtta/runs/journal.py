"""The rows and events that `adapt` writes: one row per frame, one line per event."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from remtta.engines.interrupts import Interrupts
from remtta.errors import counted
from remtta.guard.judge import describe
from remtta.options import RunOptions
from remtta.runs.batch import BatchResult
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.place import Place
from remtta.runs.reading import Row
from remtta.runs.rows import RowFormat, prediction_rows
from remtta.runs.writer import RowWriter
from remtta.streams.frames import Gap

_MAX_IN_PIPE = 2**20  # capacity of a pipe, unless root allowed more
_QUIET_EVENTS = ("doubt", "trust", "pardon")  # not worth a warning

_log = logging.getLogger("remtta")


class Journal:
    """Predictions and events of a run, synced to disk before anything else happens.

    Args:
        folder: The run's folder.
        pipe: A binary stream that receives the prediction lines as well.
        labels: One name per class, or None.
        options: Options that decide the format of rows.
        eventful: Whether events are possible: there is a guard, or a live source.
        live: Whether past frames cannot be read again.
    """

    def __init__(
        self,
        folder: Path,
        pipe: BinaryIO | None,
        labels: Sequence[str] | None,
        options: RunOptions,
        *,
        eventful: bool,
        live: bool,
    ) -> None:
        self._folder, self._pipe = folder, pipe
        self._form = RowFormat(labels, topk=options.topk, logits=options.logits)
        self._eventful, self._live = eventful, live
        self._rows: RowWriter | None = None
        self._events: RowWriter | None = None

    @property
    def begun(self) -> bool:
        """True if its files are open."""
        return self._rows is not None

    def begin(self) -> None:
        """Create new files.

        Raises:
            OutputError: If that fails.
        """
        self._rows = RowWriter(self._folder / PREDICTIONS, self._pipe, durable=True)
        if self._eventful:
            self._events = RowWriter(self._folder / EVENTS, durable=True)

    def resume_from(self, place: Place) -> list[Row]:
        """Open the files of an earlier run, whose state was saved at `place`.

        Returns:
            For a live source, the rows written after `place`, since their frames cannot be read again.

        Raises:
            UsageError: If lines are missing or damaged.
            OutputError: If the files cannot be written.
        """
        self._rows = RowWriter(
            self._folder / PREDICTIONS,
            self._pipe,
            keep_bytes=place.num_bytes,
            keep_tail=True,
            durable=True,
            kept_sha256=place.rows_sha256,
            remade=not self._live,
        )
        if self._rows.num_damaged:
            _log.warning(
                "the last %s of %s are damaged, and are written again",
                counted(self._rows.num_damaged, "line"),
                PREDICTIONS,
            )
        passed = self._rows.unsaved_rows() if self._live else []
        if self._eventful:
            path = self._folder / EVENTS
            kept = place.event_bytes if path.exists() else 0  # if the user deleted the events, go on without them
            self._events = RowWriter(path, keep_bytes=kept, keep_tail=True, durable=True)
            if self._live:
                self._events.unsaved_rows()
        return passed

    def write(self, result: BatchResult) -> list[Row]:
        """Write a batch's predictions, and return the rows.

        Raises:
            OutputError: If they cannot be written; the file is then unchanged.
        """
        assert self._rows is not None
        rows = prediction_rows(result, self._form)
        agreed = self._rows.num_changed == 0
        self._rows.write(rows)
        if agreed and self._rows.num_changed:
            _log.warning(
                "from frame %d on, some predictions differ from those made before the run was stopped, which stay; "
                "another machine, device or number of threads?",
                next(row["index"] for row in rows if "index" in row),
            )
        return rows

    def echo(self, interrupts: Interrupts) -> None:
        """Send the rows written last down the pipe.

        Raises:
            ReaderGone: If the reader closed the pipe.
            Stopped: If a signal arrived while the reader was blocked.
            OutputError: If it fails for another reason.
        """
        assert self._rows is not None
        self._rows.echo(interrupts)

    def replay(self, place: Place, interrupts: Interrupts) -> None:
        """Send again the rows that the reader may have missed when this place was saved, or since.

        Raises:
            ReaderGone, Stopped, OutputError: As for `echo`.
        """
        assert self._rows is not None
        num_lines = self._rows.replay(max(0, place.passed_bytes - _MAX_IN_PIPE), interrupts)
        _log.info("repeated the last %s", counted(num_lines, "row"))

    def expected_rows(self) -> list[Row]:
        """Return the rows of the earlier run that were not produced again yet."""
        return self._rows.expected_rows() if self._rows else []

    def write_event(self, index: int, event: dict[str, Any]) -> None:
        """Write an event at a frame, with the time."""
        if self._events:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._events.write([{"time": now, "frame": index, **event}])

    def write_gap(self, index: int, source: str, gap: Gap) -> None:
        """Write that a live source was unavailable before a frame."""
        self.write_event(index, {"event": "gap", "source": source, **dataclasses.asdict(gap)})

    def write_decision(self, index: int, event: dict[str, Any]) -> None:
        """Write and log a decision of the guard on the batch that begins at a frame."""
        self.write_event(index, event)
        level = logging.DEBUG if event["event"] in _QUIET_EVENTS else logging.WARNING
        _log.log(level, "frame %d: %s", index, describe(event))

    def note(self, place: Place) -> None:
        """Update a place with the sizes of the files, without lines still expected from the earlier run."""
        assert self._rows is not None
        place.num_bytes, place.rows_sha256 = self._rows.size, self._rows.sha256
        place.event_bytes = self._events.size if self._events else 0

    def close(self) -> None:
        """Close the files."""
        for writer in (self._rows, self._events):
            if writer:
                writer.close()
