"""Write JSON Lines in stream order, complete lines only."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from remtta.errors import OutputError, UsageError, counted
from remtta.files import from_json, to_json, writing
from remtta.runs.reading import Row

_CHUNK_BYTES = 2**20


class RowWriter:
    """Appends rows to a file, batch by batch. Raise UsageError if the file is shorter than `keep_bytes`, they do not
    match `kept_sha256`, or damaged rows would not be produced again; OutputError if the file cannot be written.

    Args:
        keep_bytes: How many bytes of an existing file to keep and append to.
        keep_tail: Also keep the complete lines after them, which an earlier run wrote after its last save. The first
            rows written are then assumed to be the same ones, and are not written again.
        durable: Sync every row to disk before `write` returns, safe from a power failure.
        remade: Whether rows of the tail will be produced again; if so, damaged ones are dropped.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep_bytes: int = 0,
        keep_tail: bool = False,
        durable: bool = False,
        kept_sha256: str | None = None,
        remade: bool = True,
    ) -> None:
        self._path, self._durable = path, durable
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
        """Close the file."""
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

    def write(self, rows: Iterable[Mapping[str, object]]) -> bytes:
        """Write rows to the file, all or none, flushed to the operating system on return; return the lines added."""
        lines = deque((to_json(row) + "\n").encode("ascii") for row in rows)
        while self._expected and lines:
            expected, line = self._expected.popleft(), lines.popleft()
            self.num_changed += expected != line and b'"early": true' not in expected + line
            self._digest.update(expected)
        added = b"".join(lines)
        if not added:
            return added
        try:
            with writing(self._path):
                try:
                    in_place = os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
                except FileNotFoundError:
                    in_place = False
                if not in_place:
                    raise OutputError(f"{self._path} was deleted or replaced while it was written; its rows are lost")
                view = memoryview(added)
                while view:
                    view = view[os.write(self._file.fileno(), view) :]
                if self._durable:
                    os.fsync(self._file.fileno())
        except OutputError:
            with contextlib.suppress(OSError):  # even a full disk can truncate a partial line
                self._file.truncate(self._size)
            raise
        self._size += len(added)
        self._digest.update(added)
        return added

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
