"""Paths on standard input, and the frames at paths."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Never

from remtta.errors import FrameError, StreamError, UsageError
from remtta.files import UTF16_MARKS
from remtta.streams.frames import Frame
from remtta.streams.images import load_image
from remtta.streams.video import is_video, iter_video

_PIPE_CHUNK_BYTES = 65_536
_MAX_PATH_BYTES = 32_768  # well over any system's limit
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1f]")  # characters of image files, hardly ever of paths
_SIGNATURE = re.compile(rb"\x89PNG|\xff\xd8\xff|.{257}ustar", re.DOTALL)  # of PNG, JPEG and tar
_NO_PATHS = "standard input holds no paths; give an image or a video by its name"


def read_paths(descriptor: int, null_separated: bool = False) -> Iterator[str]:
    """Yield paths from a pipe as soon as they are complete; bytes that are not UTF-8 are preserved, and UTF-16 with a
    byte order mark is read as well.

    The descriptor is read without Python's buffering, whose lock would hang the interpreter's exit.
    """
    separator = b"\0" if null_separated else b"\n"
    rest, separated, first = b"", False, True
    utf16 = None
    while chunk := _read(descriptor):
        if first and _SIGNATURE.match(chunk):
            raise UsageError(_NO_PATHS)
        if first and chunk.startswith(UTF16_MARKS):  # from PowerShell
            utf16 = codecs.getincrementaldecoder("utf-16")("replace")
        chunk = chunk.removeprefix(codecs.BOM_UTF8) if first else chunk
        chunk = utf16.decode(chunk).encode("utf-8", "surrogatepass") if utf16 else chunk
        first = False
        *complete, rest = (rest + chunk).split(separator)
        separated |= bool(complete)
        yield from _decoded(complete, null_separated)
        _check_separator(rest, null_separated)
    if null_separated and not separated and rest.endswith(b"\n"):
        raise UsageError("the paths on standard input end in newline, not in NUL; leave -0 out")
    yield from _decoded([rest], null_separated)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _PIPE_CHUNK_BYTES)
    except OSError as error:
        raise UsageError(f"standard input cannot be read ({error.strerror}); pipe paths into it") from error


def _decoded(paths: Sequence[bytes], null_separated: bool) -> Iterator[str]:
    for path in paths:
        path = path if null_separated else path.removesuffix(b"\r")
        _check_separator(path, null_separated)
        if path:
            yield os.fsdecode(path)


def _check_separator(path: bytes, null_separated: bool) -> None:
    if b"\0" in path and _CONTROL.search(path):
        raise UsageError(_NO_PATHS)
    if b"\0" in path:
        raise UsageError(
            "the paths on standard input end in NUL, not in newline; add -0 (if they are UTF-16, write them as UTF-8)"
        )
    if len(path) > _MAX_PATH_BYTES:
        advice = "do they end in newline? Then leave -0 out" if null_separated else "write one per line"
        raise UsageError(f"a path on standard input is longer than {_MAX_PATH_BYTES} bytes; {advice}")


def frames_at(paths: Iterable[str]) -> Iterator[Frame]:
    """Yield the frames of images and videos; one bad video among many is one unreadable frame."""
    for path in paths:
        if not is_video(path) or not os.path.isfile(path):
            yield Frame(path, partial(load_image, Path(path)))
            continue
        try:
            yield from iter_video(path)
        except StreamError as error:
            yield Frame(path, partial(_fail, FrameError(str(error).removeprefix(path).lstrip(": "))))


def _fail(error: Exception) -> Never:
    raise error
