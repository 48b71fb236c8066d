"""Write JSON Lines in stream order, complete lines only."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from remtta.errors import OutputError, UsageError, counted
from remtta.files import from_json, to_json, writing
from remtta.interrupts import Interrupts
from remtta.runs.reading import Row

READER_PATIENCE_S = 2.0  # for the reader to take the rest, after a signal
_POLL_S = 0.1
_CHUNK_BYTES = 2**20


class ReaderGone(Exception):
    """The reader of standard output closed the pipe."""


class RowWriter:
    """Appends rows to a file, batch by batch, and to a pipe as well, if there is one. Raise UsageError if the file is
    shorter than `keep_bytes`, they do not match `kept_sha256`, or damaged rows would not be produced again;
    OutputError if the file cannot be written.

    Args:
        keep_bytes: How many bytes of an existing file to keep and append to.
        keep_tail: Also keep the complete lines after them, which an earlier run wrote after its last save. The first
            rows written are then assumed to be the same ones, and are neither written nor sent again.
        durable: Sync every row to disk before `write` returns, safe from a power failure.
        remade: Whether rows of the tail will be produced again; if so, damaged ones are dropped.
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
        self.num_changed = 0  # expected rows that differed this time
        self.num_damaged = 0  # damaged lines in the tail, including all lines after the first of them
        self._digest = hashlib.sha256()
        keeps = (keep_bytes > 0 or keep_tail) and path.exists()
        if keep_bytes > (path.stat().st_size if keeps else 0):
            raise UsageError(
                f"{path} has lost lines since they were saved; restore it, or start again with --overwrite"
            )
        with writing(path):
            if not keeps and path.is_symlink():  # do not write through a link
                path.unlink()
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
            _read_into(self._digest, self._file, keep_bytes)
            if kept_sha256 is not None and self._digest.hexdigest() != kept_sha256:
                self._file.close()
                raise UsageError(f"{path} was changed since it was saved; restore it, or start again with --overwrite")
            if keep_tail:
                tail = self._file.read()
                lines = tail[: tail.rfind(b"\n") + 1].splitlines(keepends=True)
                self._expected.extend(itertools.takewhile(_is_row, lines))  # the rest can be produced again
                self.num_damaged = len(lines) - len(self._expected)
            if self.num_damaged and not remade:
                self._file.close()
                raise UsageError(
                    f"the last {counted(self.num_damaged, 'line')} of {path} cannot be read; repair or remove them"
                )
            self._size = keep_bytes + sum(map(len, self._expected))
            self._file.truncate(self._size)  # drops an incomplete line

    def close(self) -> None:
        """Close the file; the pipe stays open."""
        self._file.close()

    def expected_rows(self) -> list[Row]:
        """Return the rows of the earlier run's tail that were not produced again yet."""
        return [from_json(line.decode()) for line in self._expected]

    def unsaved_rows(self) -> list[Row]:
        """Return the rows of the earlier run's tail and stop expecting them, for a stream that cannot be read again."""
        rows = self.expected_rows()
        self._digest.update(b"".join(self._expected))
        self._expected.clear()
        return rows

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write rows to the file, all or none; they have left the process when this returns."""
        lines = deque((to_json(row) + "\n").encode("ascii") for row in rows)
        while self._expected and lines:
            expected, line = self._expected.popleft(), lines.popleft()
            self.num_changed += expected != line and b'"early": true' not in expected + line
            self._digest.update(expected)
        self._lines = b"".join(lines)
        if not self._lines:
            return
        try:
            with writing(self._path):
                try:
                    in_place = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
                except FileNotFoundError:
                    in_place = False
                if not in_place:
                    raise OutputError(f"{self._path} was deleted or replaced while it was written; its rows are lost")
                view = memoryview(self._lines)
                while view:
                    view = view[os.write(self._file.fileno(), view) :]
                if self._durable:
                    os.fsync(self._file.fileno())
        except OutputError:
            with contextlib.suppress(OSError):  # even a full disk can truncate a partial line
                self._file.truncate(self._size)
            raise
        self._size += len(self._lines)
        self._digest.update(self._lines)

    @property
    def size(self) -> int:
        """Size of the file in bytes, without lines of an earlier run that are still expected."""
        return self._size - sum(map(len, self._expected))

    @property
    def sha256(self) -> str:
        """Hash of the first `size` bytes of the file."""
        return self._digest.hexdigest()

    def sync(self) -> int:
        """Sync everything written so far; return the `size`."""
        with writing(self._path):
            os.fsync(self._file.fileno())
        return self.size

    def echo(self, interrupts: Interrupts) -> None:
        """Send the rows written last down the pipe; a blocked reader is waited for until `READER_PATIENCE_S` after a
        signal.

        Raises:
            ReaderGone: If the reader closed the pipe; the file has every row.
            Stopped: If a signal has arrived, and the reader closed the pipe or did not take all of it in time.
            OutputError: If it fails for another reason.
        """
        if self._pipe is None:
            return
        try:
            _send_to_pipe(self._pipe, self._lines, interrupts)
        except BrokenPipeError as error:
            interrupts.stop_now()  # Ctrl-C in a pipeline ends the reader, too
            raise ReaderGone from error
        except OSError as error:
            raise OutputError(
                f"the predictions cannot be written to standard output: {error.strerror or error}"
            ) from error


def _send_to_pipe(pipe: BinaryIO, data: bytes, interrupts: Interrupts) -> None:
    """Write to a pipe in parts that never block, so that signals are handled even if the reader is stuck."""
    raw = pipe.raw if isinstance(pipe, io.BufferedWriter) else pipe
    if not isinstance(raw, io.FileIO) or os.name == "nt":  # where select supports only sockets
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


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _read_into(digest: hashlib._Hash, file: BinaryIO, num_bytes: int) -> None:
    """Hash the first `num_bytes` bytes of a file, and leave the file positioned after them."""
    file.seek(0)
    while num_bytes and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        digest.update(chunk)
        num_bytes -= len(chunk)
