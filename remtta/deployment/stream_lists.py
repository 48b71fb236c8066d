"""Lists of streams: files of names and addresses, and the folder of their runs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from remtta.errors import UsageError
from remtta.files import read_text
from remtta.runs.folder import STREAM_GROUP, check_folder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_FORM = "name=address on each line"


def read_sources(path: Path) -> dict[str, str]:
    """Read a list of sources: addresses by name, in order.

    Empty lines and lines that begin with # are ignored. Raise UsageError if the file cannot be read or is empty, a line
    is malformed, or a name occurs twice. The message contains no address, which may hold a password.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not a file; --streams takes a list of sources, {_FORM}")
    sources: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, read_text(path, "--streams").splitlines()), 1):
        if not line or line.startswith("#"):
            continue
        name, equals, address = (part.strip() for part in line.partition("="))
        position = f"{path}, line {number}"
        if not equals or not address:
            raise UsageError(f"{position} is not a name and an address; a list of sources has {_FORM}")
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{position}: a name has at most 64 letters, digits, - and _, and starts with a letter or digit"
            )
        if name.lower() in map(str.lower, sources):  # case-insensitive file systems do not distinguish the folders
            raise UsageError(f"{position}: there is a stream called {name} already; call this one something else")
        if address == "-":
            raise UsageError(f"{position}: {name} cannot be standard input; name a file, folder, camera or address")
        sources[name] = address
    if not sources:
        raise UsageError(f"{path} names no source; write {_FORM}")
    return sources


def check_group_folder(folder: Path, names: Iterable[str], *, overwrite: bool, resume: bool) -> None:
    """Raise if a folder cannot hold the runs of these streams, each in a folder of its own; changes nothing."""
    check_folder(folder, STREAM_GROUP, overwrite=overwrite, resume=resume)
    for name in names:
        check_folder(folder / name, overwrite=overwrite, resume=resume)
