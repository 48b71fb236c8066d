"""Stores of files at addresses that fsspec knows, such as s3://bucket/folder (the extra `remote`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from remtta.errors import DownloadError, FrameError, OutputError, RemttaError, UsageError, without_password

_HIDDEN = "***"  # what `without_password` puts in its place


class Remote(NamedTuple):
    """A place in a store.

    Attributes:
        files: A file system of fsspec.
        path: A folder there.
        shown: Its address without a password.
    """

    files: Any
    path: str
    shown: str


def is_address(place: str | Path) -> bool:
    """Whether a place is an address, not a path."""
    return "://" in str(place)


def remote_at(address: str) -> Remote | Path:
    """The place at an address; of `file://` a folder of this machine.

    Raises:
        UsageError: If nothing here knows such addresses.
        DownloadError: If its server cannot be reached.
    """
    try:
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem
    except ImportError as error:
        raise UsageError('an address with :// needs fsspec; pip install "remtta[remote]"') from error
    shown = without_password(address)
    with told(shown, DownloadError):
        try:
            files, path = url_to_fs(address, skip_instance_cache=True)  # a transaction is not for two threads
        except (ImportError, ValueError) as error:  # fsspec says what to install
            raise UsageError(f"{shown}: fsspec cannot open it ({_text(error, shown)})") from None
    return Path(path) if isinstance(files, LocalFileSystem) else Remote(files, path.rstrip("/"), shown)


@contextlib.contextmanager
def told(shown: str, kind: type[RemttaError]) -> Iterator[None]:
    """Turn whatever a store's client raises, which may be of any class, into one line.

    Args:
        shown: The address, as it may be shown.
        kind: What is raised.
    """
    try:
        yield
    except RemttaError:
        raise
    except Exception as error:
        raise kind(f"{shown}: {_text(error, shown)}") from (None if _HIDDEN in shown else error)


@dataclass(frozen=True)
class Stored:
    """A folder or file in a store, with a path's operations as far as they are needed; workers open the store anew.

    Attributes:
        address: Of the folder that it is in or below, or is.
        parts: Names on the way from there.
    """

    address: str
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "/".join((without_password(self.address.rstrip("/")), *self.parts))

    def __truediv__(self, name: str) -> Stored:
        return Stored(self.address, (*self.parts, name))

    @property
    def name(self) -> str:
        """That of the folder or file."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> Stored:
        """The folder that it is in."""
        return Stored(self.address, self.parts[:-1])

    def entries(self) -> tuple[list[str], list[str]]:
        """Names of the folders and of the files in this folder.

        Raises:
            UsageError: If there is no such folder.
            DownloadError: If the store cannot be read.
        """
        with self._in_store(DownloadError) as (files, path):
            try:
                found = [(each["name"].rstrip("/"), each["type"]) for each in files.ls(path, detail=True)]
            except FileNotFoundError:
                raise UsageError(f"{self}: no such folder") from None
        names = [(name.rpartition("/")[2], kind) for name, kind in found if name.strip("/") != path.strip("/")]
        folders = [name for name, kind in names if kind == "directory"]
        return folders, [name for name, kind in names if kind != "directory"]

    def read(self) -> bytes:
        """What is in the file.

        Raises:
            FrameError: If there is no such file.
            DownloadError: If the store cannot be read.
        """
        with self._in_store(DownloadError) as (files, path):
            try:
                content: bytes = files.cat(path)
            except FileNotFoundError:
                raise FrameError("no such file") from None
        return content

    def exists(self) -> bool:
        """Whether there is such a file, or a folder with any.

        Raises:
            DownloadError: If the store cannot be read.
        """
        with self._in_store(DownloadError) as (files, path):
            return bool(files.exists(path))

    def below(self) -> list[str]:
        """Names of all files in this folder and below it, from here; none where there is no such folder.

        Raises:
            DownloadError: If the store cannot be read.
        """
        with self._in_store(DownloadError) as (files, path):
            files.invalidate_cache()
            return [name.removeprefix(f"{path}/") for name in files.find(path)]

    def write(self, content: bytes) -> None:
        """Write the file, at once.

        Raises:
            OutputError: If the store refuses.
        """
        with self._in_store(OutputError) as (files, path):
            files.pipe_file(path, content)

    def remove(self) -> None:
        """Remove the folder with all that is in it, if it is there.

        Raises:
            OutputError: If the store refuses.
        """
        with self._in_store(OutputError) as (files, path):
            files.invalidate_cache()
            if files.exists(path):
                files.rm(path, recursive=True)

    @contextlib.contextmanager
    def _in_store(self, kind: type[RemttaError]) -> Iterator[tuple[Any, str]]:
        """The store's files and the path of this there; what goes wrong with them is of this kind."""
        remote = _opened(self.address)
        with told(str(self), kind):
            yield remote.files, "/".join((remote.path, *self.parts))


Folder = Path | Stored
"""Where images are read from, or written to."""


def folder_at(place: str | Path) -> Folder:
    """The folder of a path or an address.

    Raises:
        RemttaError: If the address cannot be had.
    """
    if not is_address(place):
        return Path(place)
    opened = _opened(str(place))
    return opened if isinstance(opened, Path) else Stored(str(place))


@functools.cache
def _opened(address: str) -> Any:
    return remote_at(address)


def _text(error: Exception, shown: str) -> str:
    """What it says, unless that may be a part of a password that the address has."""
    text = "" if _HIDDEN in shown and not isinstance(error, ImportError) else str(error)
    return " ".join(without_password(text).split()) or type(error).__name__
