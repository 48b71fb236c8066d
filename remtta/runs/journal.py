"""What `adapt` writes down as it goes: a row per frame, and a line per event."""

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

_MOST_IN_PIPE = 2**20  # bytes that wait in one for a reader, unless root allowed more
_QUIET_EVENTS = ("doubt", "trust", "pardon", "changed")  # which are no news to a user

_log = logging.getLogger("remtta")


class Journal:
    """Predictions and events of a run, each on the disk before anything else happens.

    Args:
        folder: The run's folder.
        pipe: A binary stream that gets the prediction lines as well.
        labels: One name per class, or None.
        options: How rows look.
        eventful: Whether there is anything that can decide or happen: a guard, or a live source.
        live: Whether frames that went by cannot be seen again.
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
        """Whether its files are open."""
        return self._rows is not None

    def begin(self) -> None:
        """Open new files.

        Raises:
            OutputError: If that cannot be done.
        """
        self._rows = RowWriter(self._folder / PREDICTIONS, self._pipe, durable=True)
        if self._eventful:
            self._events = RowWriter(self._folder / EVENTS, durable=True)

    def go_on(self, place: Place) -> list[Row]:
        """Open the files of an earlier run, whose state is of this place.

        Returns:
            Rows written after that, of a source whose frames cannot be seen again.

        Raises:
            UsageError: If lines are lost or damaged.
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
            kept = place.event_bytes if path.exists() else 0  # decisions that somebody deleted are only reported
            self._events = RowWriter(path, keep_bytes=kept, keep_tail=True, durable=True)
            if self._live:
                self._events.unsaved_rows()
        return passed

    def write(self, result: BatchResult) -> list[Row]:
        """Write a batch's predictions, and return the rows.

        Raises:
            OutputError: If the disk refuses; none of them is written then.
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
        """Pass on what was written last.

        Raises:
            ReaderGone: If nobody reads it any more.
            Stopped: If a stop came while nobody did.
            OutputError: If it cannot be passed on for another reason.
        """
        assert self._rows is not None
        self._rows.echo(interrupts)

    def replay(self, place: Place, interrupts: Interrupts) -> None:
        """Pass on again what the reader may not have had when the state of this place was saved, or since.

        Raises:
            ReaderGone, Stopped, OutputError: As for `echo`.
        """
        assert self._rows is not None
        num_lines = self._rows.replay(max(0, place.passed_bytes - _MOST_IN_PIPE), interrupts)
        _log.info("repeated the last %s", counted(num_lines, "row"))

    def expected_rows(self) -> list[Row]:
        """Rows of the earlier run that were not made again yet."""
        return self._rows.expected_rows() if self._rows else []

    def write_event(self, index: int, event: dict[str, Any]) -> None:
        """Write what happened at a frame, with the time."""
        if self._events:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._events.write([{"time": now, "frame": index, **event}])

    def write_gap(self, index: int, source: str, gap: Gap) -> None:
        """Write that a live source was away before a frame."""
        self.write_event(index, {"event": "gap", "source": source, **dataclasses.asdict(gap)})

    def write_decision(self, index: int, event: dict[str, Any]) -> None:
        """Write what the guard decided in the batch that begins with a frame, and tell it."""
        self.write_event(index, event)
        level = logging.DEBUG if event["event"] in _QUIET_EVENTS else logging.WARNING
        _log.log(level, "frame %d: %s", index, describe(event))

    def note(self, place: Place) -> None:
        """Note in a place what the files hold, all of it on the disk, without lines that are still expected."""
        assert self._rows is not None
        place.num_bytes, place.rows_sha256 = self._rows.size, self._rows.sha256
        place.event_bytes = self._events.size if self._events else 0

    def close(self) -> None:
        """Close the files."""
        for writer in (self._rows, self._events):
            if writer:
                writer.close()
