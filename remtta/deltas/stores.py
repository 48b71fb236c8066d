"""Where versions of a delta are kept: a folder, or an address of a store that fsspec knows.

A store has neither locks nor names that are taken for certain. So a version there is one object, written at once, whose
name has its number and a hash of its content: of two pushed at the same time, both stay.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from remtta.deltas.reading import read_content
from remtta.errors import DownloadError, OutputError
from remtta.files import check_can_hold, remove_leftovers, write_new, writing
from remtta.remote import is_address, remote_at, told

_NAME = re.compile(r"(\d{4,})(?:-([0-9a-f]{12}))?\.safetensors")


class Version(NamedTuple):
    """A version's number and, in a store, the hash in its name; they sort by both."""

    number: int
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.number}-{self.digest}" if self.digest else str(self.number)

    @property
    def name(self) -> str:
        """Its file's."""
        return f"{self.number:04d}{'-' + self.digest if self.digest else ''}.safetensors"


class Place(Protocol):
    """Keeps versions; `shown` is its name without a password."""

    @property
    def shown(self) -> str: ...

    def versions(self) -> list[Version]:
        """Those that are there as a whole, the newest last."""

    def read(self, version: Version) -> bytes:
        """A version's file."""

    def pushed(self, version: Version) -> datetime | None:
        """When it was written, where that is known."""

    def add(self, content: bytes) -> Version:
        """Add a newest version, as a whole or not at all."""


def place_of(address: str | Path) -> Place:
    """The folder, or the store at an address with "://".

    Raises:
        UsageError: If nothing here knows such addresses.
        DownloadError: If its server cannot be reached.
    """
    address = str(address)
    if not is_address(address):
        return Folder(Path(address))
    remote = remote_at(address)
    return Folder(remote) if isinstance(remote, Path) else Store(*remote)


class Folder:
    """Versions in a folder, each linked into place once it is on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def shown(self) -> str:
        return str(self._path)

    def versions(self) -> list[Version]:
        return _versions(path.name for path in self._path.iterdir()) if self._path.is_dir() else []

    def read(self, version: Version) -> bytes:
        return read_content(self._path / version.name)

    def pushed(self, version: Version) -> datetime | None:
        return datetime.fromtimestamp((self._path / version.name).stat().st_mtime, UTC)

    def add(self, content: bytes) -> Version:
        check_can_hold(self._path, "a folder of deltas", "one")
        with writing(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._path, ("*.safetensors",))
        version = _next(self)
        while not write_new(self._path / version.name, content):  # another push was first
            version = Version(version.number + 1)
        return version


class Store:
    """Versions in a store.

    Args:
        files: A file system of fsspec.
        path: The versions' folder there.
        shown: Its address without a password.
    """

    def __init__(self, files: Any, path: str, shown: str) -> None:
        self._files, self._path, self.shown = files, path, shown

    def versions(self) -> list[Version]:
        with told(self.shown, DownloadError):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:  # a folder without objects is none; a bucket without any is
                bucket = self._path.partition("/")[0]
                if bucket and not self._files.exists(bucket):
                    raise DownloadError(f"{self.shown}: there is no such bucket; check its name, or make it") from None
                found = []
        return _versions(path.rpartition("/")[2] for path in found)

    def read(self, version: Version) -> bytes:
        with told(self.shown, DownloadError):
            content: bytes = self._files.cat_file(self._of(version))
        return content

    def pushed(self, version: Version) -> datetime | None:
        with told(self.shown, DownloadError):
            try:
                time: datetime = self._files.modified(self._of(version))
            except NotImplementedError:
                return None
        return time.astimezone(UTC)

    def add(self, content: bytes) -> Version:
        version = _next(self)._replace(digest=hashlib.sha256(content).hexdigest()[:12])
        with told(self.shown, OutputError):
            try:
                with self._files.transaction:  # a server of files gets another name first, and a store needs none
                    self._files.pipe_file(self._of(version), content)
            except FileNotFoundError as error:  # none is made, as a slip in its name would make one, too
                raise OutputError(f"{self.shown}: there is no such bucket or folder; make it first") from error
        return version

    def _of(self, version: Version) -> str:
        return f"{self._path}/{version.name}"


def _versions(names: Iterable[str]) -> list[Version]:
    found = filter(None, map(_NAME.fullmatch, names))
    return sorted(Version(int(name[1]), name[2] or "") for name in found)


def _next(place: Place) -> Version:
    versions = place.versions()
    return Version(versions[-1].number + 1 if versions else 1)
