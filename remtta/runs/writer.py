"""Prediction rows: JSON Lines in stream order, whole lines only."""

from __future__ import annotations

import contextlib
import hashlib
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

from remtta.engines.interrupts import Interrupts
from remtta.errors import OutputError, UsageError, counted
from remtta.files import writing
from remtta.runs.reading import Row

READER_PATIENCE_S = 2.0  # in which the reader is to take the rest, once the run has been told to stop
_POLL_S = 0.1
_CHUNK_BYTES = 2**20


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
        kept_sha256: Hash of what is kept, where it is known.
        remade: Whether rows of the tail are made again: then damaged ones are let go of.

    Attributes:
        num_changed: Expected rows that came out otherwise this time.
        num_damaged: Lines of the tail that were no rows any more, and what followed them.

    Raises:
        UsageError: If the file is shorter than `keep_bytes`, what is kept is not what `kept_sha256` says, or damaged
            rows would not be made again.
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
        kept_sha256: str | None = None,
        remade: bool = True,
    ) -> None:
        self._path, self._pipe, self._durable = path, pipe, durable
        self._lines = b""
        self._expected: deque[bytes] = deque()
        self.num_changed = self.num_damaged = 0
        self._digest = hashlib.sha256()
        keeps = (keep_bytes > 0 or keep_tail) and path.exists()
        if keep_bytes > (path.stat().st_size if keeps else 0):
            raise UsageError(f"{path} has lost lines since they were saved; start again with --overwrite")
        with writing(path):
            self._file = open(path, "r+b" if keeps else "w+b", buffering=0)  # noqa: SIM115 - closed in __exit__
            _read_into(self._digest, self._file, keep_bytes)
            if kept_sha256 is not None and self._digest.hexdigest() != kept_sha256:
                self._file.close()
                raise UsageError(f"{path} was changed since it was saved; restore it, or start again with --overwrite")
            if keep_tail:
                tail = self._file.read()
                self._keep_whole(tail[: tail.rfind(b"\n") + 1].splitlines(keepends=True))
            if self.num_damaged and not remade:
                self._file.close()
                raise UsageError(
                    f"the last {counted(self.num_damaged, 'line')} of {path} cannot be read; repair or remove them"
                )
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

    def _keep_whole(self, lines: list[bytes]) -> None:
        """Expect the lines of a tail up to the first that is damaged: it and what follows can be made again."""
        for number, line in enumerate(lines):
            if not _is_row(line):
                self.num_damaged = len(lines) - number
                return
            self._expected.append(line)

    def expected_rows(self) -> list[Row]:
        """Rows of the earlier run's tail that were not made again yet."""
        return [json.loads(line) for line in self._expected]

    def unsaved_rows(self) -> list[Row]:
        """Rows of the earlier run's tail, for a stream that cannot be read again: the next row is a new one then."""
        rows = self.expected_rows()
        self._digest.update(b"".join(self._expected))
        self._expected.clear()
        return rows

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to the file, all or none; they are out of this process when it returns."""
        lines = deque((json.dumps(row, allow_nan=False) + "\n").encode("ascii") for row in rows)
        while self._expected and lines:
            expected = self._expected.popleft()
            self.num_changed += expected != lines.popleft()
            self._digest.update(expected)
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
        self._digest.update(self._lines)

    @property
    def size(self) -> int:
        """The file's size in bytes, without the lines of an earlier run that are still expected."""
        return self._size - sum(map(len, self._expected))

    @property
    def sha256(self) -> str:
        """Hash of so much of the file."""
        return self._digest.hexdigest()

    def sync(self) -> int:
        """Have the disk take everything written so far; returns the `size`.

        Raises:
            OutputError: If the disk refuses.
        """
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self.size

    def replay(self, start: int, interrupts: Interrupts) -> int:
        """Send the whole lines behind a place in the file down the pipe again; returns how many there are.

        Raises:
            ReaderGone, Stopped, OutputError: As for `echo`.
        """
        self._file.seek(start)
        if start:
            start += len(self._file.read(_CHUNK_BYTES).partition(b"\n")[0]) + 1
            self._file.seek(start)
        num_lines, left = 0, self._size - start
        while left > 0 and (chunk := self._file.read(min(left, _CHUNK_BYTES))):
            self._send(chunk, interrupts)
            num_lines, left = num_lines + chunk.count(b"\n"), left - len(chunk)
        self._file.seek(self._size)
        return num_lines

    def echo(self, interrupts: Interrupts | None = None) -> None:
        """Send what was written last down the pipe.

        Args:
            interrupts: Ends the wait for a reader that takes nothing, `READER_PATIENCE_S` after a signal.

        Raises:
            ReaderGone: If its reader has closed it; the file has every row.
            Stopped: If it did not take all of it in time.
            OutputError: If it cannot take them for another reason.
        """
        self._send(self._lines, interrupts or Interrupts())

    def _send(self, data: bytes, interrupts: Interrupts) -> None:
        if self._pipe is None:
            return
        try:
            _pass_on(self._pipe, data, interrupts)
        except BrokenPipeError as error:
            raise ReaderGone from error
        except OSError as error:
            raise OutputError(
                f"the predictions cannot be written to standard output: {error.strerror or error}"
            ) from error


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


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_into(digest: hashlib._Hash, file: BinaryIO, num_bytes: int) -> None:
    """Have a digest take the first so many bytes of a file, and leave the file there."""
    file.seek(0)
    while num_bytes and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        digest.update(chunk)
        num_bytes -= len(chunk)
