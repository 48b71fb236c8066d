"""Ordered streams of frames from images, folders, globs, videos, cameras, URLs and pipes."""

from __future__ import annotations

import glob
import itertools
import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from remtta.errors import StreamError, UsageError, counted, without_password
from remtta.options import LiveOptions, StreamOptions
from remtta.options.loaders import is_model_file
from remtta.options.model import WEIGHT_SUFFIXES
from remtta.options.run_options import Buffer, Sort
from remtta.streams.capture import check_protocol
from remtta.streams.frames import Frame
from remtta.streams.images import has_suffix, image_suffixes, is_image
from remtta.streams.listing import is_clutter, list_files, none_but, sort_files
from remtta.streams.live import LiveSource
from remtta.streams.paths import frames_at, read_paths
from remtta.streams.video import VIDEO_SUFFIXES, is_video, iter_video

_MAX_CAMERA = 9999

_log = logging.getLogger(__name__)

Source = str | os.PathLike[str] | int | Iterable[str | os.PathLike[str]]
"""An image, a folder, a glob, a video, a camera's number, an address, "-", or paths; see `open_stream`."""


@dataclass(frozen=True)
class Stream:
    """Frames in order, to be read once."""

    name: str  # the source as given
    kind: str  # "image", "folder", "glob", "video", "camera", "url", "paths", "missing"
    frames: Iterator[Frame]  # read on demand
    num_frames: int | None = None  # if known beforehand
    live_source: LiveSource | None = None  # reader of a camera or network stream
    left_out: Mapping[str, int] = field(default_factory=dict)  # a folder's other files, by suffix or reason
    reopen: Callable[[], Stream] | None = None  # opens it again, also in another process; None for a list of paths
    options: StreamOptions = field(default_factory=StreamOptions)  # with which it was opened

    @property
    def live(self) -> bool:
        """True if past frames cannot be read again."""
        return self.kind in ("camera", "url")

    def close(self) -> None:
        """Close a camera or network stream, from any thread."""
        if self.live_source:
            self.live_source.close()

    def check_not_empty(self) -> None:
        """Raise StreamError for a stream that gave no frame, unless it is a list of paths, which may be empty."""
        if self.kind != "paths":
            raise StreamError(f"{self.name}: the source has no frames")


def open_stream(
    source: Source,
    *,
    sort: Sort = "name",
    frame_stride: int = 1,
    limit: int | None = None,
    null_separated: bool = False,
    reconnect_for: float | None = None,
    buffer: Buffer | None = None,
    poll: float | None = None,
    wait_at_start: bool = False,
) -> Stream:
    """Open a source of frames.

    Args:
        source: An image, a folder (recursive), a glob, a video, a camera index, an rtsp:// or http(s):// address, "-"
            for paths on standard input, or the paths themselves; those of an iterator are read as it gives them.
        sort: Order of a folder's or glob's files: natural by "name", by "mtime", or "none".
        frame_stride: Use every frame_stride-th frame.
        limit: Stop after this many frames.
        null_separated: Paths on standard input end in NUL instead of newline.
        reconnect_for: Seconds to try to get a lost camera or network stream back; 0 ends the stream at the first loss.
            By default 60.
        buffer: Which frames of a camera or network stream count if the model is slower: the "latest", the default, or
            "all".
        poll: Seconds between requests of an http:// address that serves a still image, of which an unchanged one is
            used once. By default 1 if the address ends like one, e.g. in .jpg; else a video is expected.
        wait_at_start: Also wait for a source that is unavailable at the start, instead of failing at once.

    Returns:
        The stream, to be read once. Its frames are decoded only when they are loaded.

    Raises:
        UsageError: If the source does not exist, a folder holds no images, a glob matches nothing, or `reconnect_for`,
            `buffer` or `poll` is given for a source that is not live.
    """
    chosen: dict[str, Any] = {"reconnect_for": reconnect_for, "buffer": buffer, "poll": poll}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    live = LiveOptions(**chosen) if chosen else None
    options = StreamOptions(limit=limit, frame_stride=frame_stride, sort=sort, null=null_separated, live=live)
    return open_with(source, options, wait_at_start=wait_at_start)


def open_with(source: Source, options: StreamOptions, *, wait_at_start: bool = False) -> Stream:
    """Open a source of frames with the options of the command line; see `open_stream`."""
    live = replace(options.live or LiveOptions(), wait_at_start=wait_at_start)
    stream = open_source(source, replace(options, live=live))
    if not stream.live and options.live is not None:
        raise UsageError(
            f"--reconnect-for, --buffer and --poll are for cameras and network streams, and {stream.name} is neither; "
            "leave them out"
        )
    if options.live and options.live.poll and not stream.name.lower().startswith(("http://", "https://")):
        raise UsageError(f"--poll is for http:// and https:// addresses, and {stream.name} is none; leave it out")
    return stream


def open_source(source: Source, options: StreamOptions) -> Stream:
    """Open a source of frames; `options.live` are ignored unless it is a camera or a network stream."""
    if isinstance(source, int):
        if not 0 <= source <= _MAX_CAMERA:  # OpenCV crashes the process
            raise UsageError(f"there is no camera {source}; cameras are numbered from 0")
        return _live_stream("camera", source, str(source), options)
    if not isinstance(source, (str, os.PathLike)):
        paths = (os.fspath(_checked_path(path)) for path in (source if isinstance(source, Iterable) else [source]))
        if isinstance(source, Iterator):  # it may wait for a path, and never end
            return _slice(Stream("paths", "paths", frames_at(paths)), options)
        return _path_stream("paths", "paths", list(paths), options)
    name = os.fspath(source)
    if options.null and name != "-":
        raise UsageError(f"-0 is for paths on standard input (-), and the source is {without_password(name)}")
    if name == "-":
        return _slice(Stream("-", "paths", frames_at(read_paths(0, options.null))), options)
    if name.lower().startswith("file://") and not os.path.exists(name):
        name = url2pathname(name[len("file://") :].removeprefix("localhost"))
    if os.path.exists(name):  # unlike Path.exists, False for "" and for names that are too long
        return _open_existing(name, options)
    if "://" in name:
        check_protocol(name)
        return _live_stream("url", name, without_password(name), options)
    if name.isdecimal():
        return open_source(int(name), options)
    if glob.has_magic(name):
        files = [str(file) for file in sort_files(_matches(name), options.sort)]
        if not files:
            raise UsageError(f"{name}: no file matches; quote the pattern and check it")
        return _path_stream(name, "glob", files, options)
    raise UsageError(f"{name}: no such file or folder")


def _open_existing(name: str, options: StreamOptions) -> Stream:
    if os.path.isdir(name):
        files, ignored = _folder_files(Path(name), options.sort)
        return replace(_path_stream(name, "folder", files, options), left_out=ignored)
    mode = os.stat(name).st_mode
    if stat.S_ISCHR(mode):  # e.g. /dev/video0
        return _live_stream("camera", name, name, options)
    if stat.S_ISFIFO(mode):
        raise UsageError(f"{name} is a pipe; give paths on standard input, with - as the source")
    if is_video(name):
        frames = itertools.islice(iter_video(name, stride=options.frame_stride), options.limit)
        return Stream(name, "video", frames, options=options)
    if has_suffix(name, (".txt",)):
        raise UsageError(f"{name} is a text file; add --streams if it lists streams, or pipe image paths into -")
    if is_model_file(name) or has_suffix(name, WEIGHT_SUFFIXES):
        option = "--model" if is_model_file(name) else "--checkpoint"
        raise UsageError(f"{name} is a file of a model, not of frames; name it with {option}, and frames as the source")
    if not has_suffix(name, image_suffixes()) and not is_image(Path(name)):
        raise UsageError(f"{name} is neither an image nor a video that remtta can read; name frames as the source")
    return _path_stream(name, "image", [name], options)


def _matches(pattern: str) -> Iterator[Path]:
    """Return the files that match a pattern, by their shortest paths: `**` follows links, also in a loop. Clutter is
    left out, unless the pattern names it, or its dot.
    """
    shortest: dict[tuple[str, str], str] = {}
    named = set(pattern.split(os.sep))
    for path in filter(os.path.isfile, glob.iglob(pattern, recursive=True)):
        folder, name = os.path.split(path)
        if any(is_clutter(part.lstrip(".")) for part in path.split(os.sep) if part not in named):
            continue
        key = os.path.realpath(folder), name
        shortest[key] = min(shortest.get(key, path), path, key=len)
    return map(Path, shortest.values())


def _checked_path(path: object) -> str | os.PathLike[str]:
    if isinstance(path, str | os.PathLike):
        return path
    raise UsageError(
        f"a source is a path, or a list of paths, got {type(path).__name__}; pass images to a remtta.Adapter"
    )


def _folder_files(folder: Path, sort: Sort) -> tuple[list[str], Mapping[str, int]]:
    """Return the images of a folder, or else its videos; and counts of the other files."""
    ignored: Counter[str] = Counter()
    files = list_files(folder, image_suffixes(), sort, ignored)
    if not files:
        ignored.clear()
        files = list_files(folder, VIDEO_SUFFIXES, sort, ignored)
    elif videos := sum(count for suffix, count in ignored.items() if suffix in VIDEO_SUFFIXES):
        _log.warning("%s is read as a folder of images; ignoring %s in it", folder, counted(videos, "video"))
    if not files:
        raise UsageError(f"{folder}: {none_but(ignored, 'images or videos')} in this folder or below it")
    return [str(file) for file in files], dict(ignored.most_common())


def _path_stream(name: str, kind: str, paths: list[str], options: StreamOptions) -> Stream:
    stills = not any(is_video(path) for path in paths)
    total = len(paths[:: options.frame_stride][: options.limit]) if stills else None
    return _slice(Stream(name, kind, frames_at(paths), total), options)


def _live_stream(kind: str, address: str | int, name: str, options: StreamOptions) -> Stream:
    source = LiveSource(address, options.live, stride=options.frame_stride)
    frames = itertools.islice(source.frames(), options.limit)
    return Stream(name, kind, frames, live_source=source, options=options)


def _slice(stream: Stream, options: StreamOptions) -> Stream:
    stride, limit = options.frame_stride, options.limit
    stop = None if limit is None else (limit - 1) * stride + 1  # do not read past the last frame
    return replace(stream, frames=itertools.islice(stream.frames, 0, stop, stride), options=options)
