"""Lists of streams: files of names and addresses, opened together, and the folder of their runs. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from remtta.errors import StreamError, UsageError, without_password
from remtta.files import read_text
from remtta.options import LiveOptions, StreamOptions
from remtta.runs.folder import STREAM_GROUP, check_folder
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream, open_source

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
            shown = "" if re.search("[/:@]", name) else f'"{name}" is no name; '  # it may be an address
            raise UsageError(
                f"{position}: {shown}a name has at most 64 letters (a to z, A to Z), digits, - and _, and starts with "
                "a letter or digit"
            )
        if name.lower() in map(str.lower, sources):  # case-insensitive file systems do not distinguish the folders
            raise UsageError(f"{position}: there is a stream called {name} already; call this one something else")
        if address == "-":
            raise UsageError(f"{position}: {name} cannot be standard input; name a file, folder, camera or address")
        sources[name] = address
    if not sources:
        raise UsageError(f"{path} names no source; write {_FORM}")
    return sources


def open_streams(
    sources: Mapping[str, str], options: StreamOptions | None = None, *, resuming: bool = False
) -> dict[str, Stream]:
    """Open several sources, by name, as `open_stream` does; live ones that are unavailable at the start are waited for.

    Raise UsageError, naming it, if one does not exist or holds no images; when `resuming`, it fails only once read.
    """
    options, streams = options or StreamOptions(), {}
    if options.null:
        raise UsageError("-0 is for paths on standard input, and --streams reads none")
    options = replace(options, live=replace(options.live or LiveOptions(), wait_at_start=True))
    for name, source in sources.items():
        reopen = partial(_open_or_fail_later, source, options)
        try:
            stream = reopen() if resuming else open_source(source, options)
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from error
        streams[name] = replace(stream, reopen=reopen)
    return streams


def _open_or_fail_later(source: str, options: StreamOptions) -> Stream:
    """Open a source; return a stream that fails once it is read, if that is impossible."""
    try:
        return open_source(source, options)
    except UsageError as error:
        return Stream(without_password(source), "missing", _failing(StreamError(str(error))))


def _failing(error: StreamError) -> Iterator[Frame]:
    raise error
    yield  # makes this a generator


def check_group_folder(folder: Path, names: Iterable[str], *, overwrite: bool, resume: bool) -> None:
    """Raise if a folder cannot hold the runs of these streams, each in a folder of its own; changes nothing."""
    check_folder(folder, STREAM_GROUP, overwrite=overwrite, resume=resume)
    for name in names:
        check_folder(folder / name, overwrite=overwrite, resume=resume)
