"""Prediction rows: JSON Lines in stream order, whole lines only."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from remtta.errors import OutputError, UsageError
from remtta.files import writing
from remtta.runs.interrupts import Interrupts
from remtta.runs.rows import Row

READER_PATIENCE_S = 2.0  # in which the reader is to take the rest, once the run has been told to stop
_POLL_S = 0.1


class ReaderGone(Exception):
    """Whoever read the predictions from standard output closed the pipe."""


class RowWriter:
    """Append rows to a file, batch by batch, and optionally to a pipe as well.

    Args:
        path: The JSON Lines file.
        pipe: A binary stream that gets the same lines, after the file has them.
        keep_bytes: How much of an existing file to keep and go on from.
        keep_tail: Keep the whole lines after `keep_bytes`, too: rows that an earlier run promised after its last
            save. The first rows written are then taken to be the same ones, and are neither written nor passed on.
        durable: Have every row on the disk when `write` returns, safe from a power failure.

    Raises:
        UsageError: If the file is shorter than `keep_bytes`.
        OutputError: If the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        pipe: BinaryIO | None = None,
        *,
        keep_bytes: int = 0,
        keep_tail: bool = False,
        durable: bool = False,
    ) -> None:
        self._path, self._pipe, self._durable = path, pipe, durable
        self._lines = b""
        self._expected: deque[bytes] = deque()
        self.num_changed = 0
        keeps = (keep_bytes > 0 or keep_tail) and path.exists()
        if keep_bytes > (path.stat().st_size if keeps else 0):
            raise UsageError(f"{path} has lost lines since they were saved; start again with --overwrite")
        with writing(path):
            self._file = open(path, "r+b" if keeps else "w+b", buffering=0)  # noqa: SIM115 - closed in __exit__
            self._file.seek(keep_bytes)
            if keep_tail:
                tail = self._file.read()
                self._expected.extend(tail[: tail.rfind(b"\n") + 1].splitlines(keepends=True))
            self._size = keep_bytes + sum(map(len, self._expected))
            self._file.truncate(self._size)  # drops a line torn by a power failure
            self._file.seek(self._size)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the pipe stays open."""
        self._file.close()

    def unsaved_rows(self) -> list[Row]:
        """Rows of the earlier run's tail, for a stream that cannot be read again: the next row is a new one then.

        Raises:
            UsageError: If a line is damaged.
        """
        try:
            rows = [json.loads(line) for line in self._expected]
        except ValueError as error:
            raise UsageError(f"{self._path} is damaged ({error}); start again with --overwrite") from error
        self._expected.clear()
        return rows

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to the file, all or none; they are out of this process when it returns."""
        lines = deque((json.dumps(row, allow_nan=False) + "\n").encode("ascii") for row in rows)
        while self._expected and lines:
            self.num_changed += self._expected.popleft() != lines.popleft()
        self._lines = b"".join(lines)
        if not self._lines:
            return
        try:
            with writing(self._path):
                _write_all(self._file.fileno(), self._lines)
                if self._durable:
                    os.fsync(self._file.fileno())
        except OutputError:
            with contextlib.suppress(OSError):  # a disk that is full can still cut off half a line
                self._file.truncate(self._size)
            raise
        self._size += len(self._lines)

    @property
    def size(self) -> int:
        """The file's size in bytes, without the lines of an earlier run that are still expected."""
        return self._size - sum(map(len, self._expected))

    def sync(self) -> int:
        """Have the disk take everything written so far; returns the `size`.

        Raises:
            OutputError: If the disk refuses.
        """
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self.size

    def echo(self, interrupts: Interrupts | None = None) -> None:
        """Send what was written last down the pipe.

        Args:
            interrupts: Ends the wait for a reader that takes nothing, `READER_PATIENCE_S` after a signal.

        Raises:
            ReaderGone: If its reader has closed it; the file has every row.
            Stopped: If it did not take all of it in time.
            OutputError: If it cannot take them for another reason.
        """
        if self._pipe is not None:
            try:
                _pass_on(self._pipe, self._lines, interrupts or Interrupts())
            except BrokenPipeError as error:
                raise ReaderGone from error
            except OSError as error:
                raise OutputError(f"the predictions cannot be passed on: {error.strerror or error}") from error


def _pass_on(pipe: BinaryIO, data: bytes, interrupts: Interrupts) -> None:
    """Write to a pipe in parts that never block, so that a stuck reader does not keep a signal from being heard."""
    raw = pipe.raw if isinstance(pipe, io.BufferedWriter) else pipe
    if not isinstance(raw, io.FileIO) or os.name == "nt":  # where select is for sockets only
        pipe.write(data)
        pipe.flush()
        return
    pipe.flush()
    descriptor, view, deadline = raw.fileno(), memoryview(data), math.inf
    while view:
        if interrupts.pending:
            deadline = min(deadline, time.monotonic() + READER_PATIENCE_S)
        if time.monotonic() > deadline:
            interrupts.stop_now()
        if select.select([], [descriptor], [], _POLL_S)[1]:
            view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
