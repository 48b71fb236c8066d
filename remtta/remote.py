"""Stores of files at addresses that fsspec knows, such as s3://bucket/folder (the extra `remote`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from remtta.errors import DownloadError, RemttaError, UsageError, without_password

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


def _text(error: Exception, shown: str) -> str:
    """What it says, unless that may be a part of a password that the address has."""
    text = "" if _HIDDEN in shown and not isinstance(error, ImportError) else str(error)
    return " ".join(without_password(text).split()) or type(error).__name__
