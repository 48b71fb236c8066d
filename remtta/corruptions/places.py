"""Where a tree of corrupted images is made: a folder of this machine, or one of a store."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from remtta.errors import FrameError
from remtta.files import check_can_hold, remove_leftovers, write_atomically, writing
from remtta.remote import Folder, Stored

_WRITTEN_IN_S = 60.0


class Place(Protocol):
    """The root of a tree. Files and folders in it are called by their paths below it, as in "fog/5/cat/1.JPEG".

    All raise OutputError if a file cannot be written, and DownloadError if a store cannot be read.
    """

    def check(self) -> None:
        """Refuse what cannot be written to, touching nothing."""

    def make(self) -> None:
        """Have the root there."""

    def read(self, name: str) -> bytes | None:
        """What a file holds; None if there is none."""

    def write(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write a file as a whole; if durable, it is to outlast a power failure."""

    def has(self, name: str) -> bool:
        """Whether there is anything of this name."""

    def is_whole(self, name: str, end: bytes) -> bool:
        """Whether there is such a file with this end: after a power failure, or in a cut copy, it may have none."""

    def remove(self, name: str) -> None:
        """Remove a folder of files, and the one that it is in if nothing else is there."""

    def remove_leftovers(self, names: Iterable[str], folders: Iterable[str]) -> None:
        """Remove what a killed run was writing, of files in the root and of images in folders and below them."""


def place_of(folder: Folder) -> Place:
    """The folder as a place to make a tree in."""
    return _InStore(folder) if isinstance(folder, Stored) else _Here(folder)


@dataclass(frozen=True)
class _Here:
    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def check(self) -> None:
        check_can_hold(self.root, "a folder", "DST")

    def make(self) -> None:
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, *, durable: bool = True) -> None:
        path = self.root / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: temporary.write_bytes(content), durable=durable)

    def has(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def is_whole(self, name: str, end: bytes) -> bool:
        try:
            with open(self.root / name, "rb") as file:
                file.seek(-len(end), os.SEEK_END)
                return file.read() == end
        except OSError:  # absent, or shorter than that
            return False

    def remove(self, name: str) -> None:
        with writing(self.root):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.root / name)
            with contextlib.suppress(OSError):  # something else lies there: it stays
                (self.root / name).parent.rmdir()

    def remove_leftovers(self, names: Iterable[str], folders: Iterable[str]) -> None:
        # Another run may be making other corruptions of the same tree meanwhile.
        remove_leftovers(self.root, tuple(names), untouched_for_s=_WRITTEN_IN_S)
        for name in folders:
            for folder, _, _ in os.walk(self.root / name):
                remove_leftovers(Path(folder), ("*.JPEG", "*.png"), untouched_for_s=_WRITTEN_IN_S)


@dataclass(frozen=True)
class _InStore:
    """Files of stores appear as a whole, and folders with their first file."""

    root: Stored

    def __str__(self) -> str:
        return str(self.root)

    def check(self) -> None:
        pass

    def make(self) -> None:
        _kept_in.cache_clear()

    def read(self, name: str) -> bytes | None:
        try:
            return (self.root / name).read()
        except FrameError:
            return None

    def write(self, name: str, content: bytes, *, durable: bool = True) -> None:
        (self.root / name).write(content)

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def is_whole(self, name: str, end: bytes) -> bool:
        corruption, severity, file = name.split("/", 2)
        return file in _kept_in(self.root / corruption / severity)

    def remove(self, name: str) -> None:
        (self.root / name).remove()

    def remove_leftovers(self, names: Iterable[str], folders: Iterable[str]) -> None:
        pass


@functools.cache
def _kept_in(folder: Stored) -> frozenset[str]:
    """What a folder had when this process first asked."""
    return frozenset(folder.below())
