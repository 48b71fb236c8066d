"""Which frames `remtta adapt` reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from remtta.errors import UsageError
from remtta.options import RunOptions

if TYPE_CHECKING:
    from remtta.streams.sources import Stream

Source = Annotated[
    str,
    typer.Argument(
        help="Image, folder, quoted glob, video, camera index, rtsp:// or http(s):// URL, or - (paths on stdin)."
    ),
]

_option = partial(typer.Option, rich_help_panel="Stream and output")


@dataclass(frozen=True)
class StreamOptions:
    """Which frames of a source, and in what order."""

    streams: Annotated[
        bool,
        _option("--streams", help="SOURCE is a file that lists many, name=address on each line; one model for all."),
    ] = False
    sort: Annotated[Literal["name", "mtime", "none"], _option(help="Order of a folder's or glob's files.")] = "name"
    frame_stride: Annotated[int, _option(min=1, help="Take every K-th frame.")] = 1
    limit: Annotated[int | None, _option(min=1, help="Stop after this many frames.")] = None
    null: Annotated[bool, _option("-0", "--null", help="Paths on stdin end in NUL.")] = False
    require_frames: Annotated[
        bool, _option("--require-frames", help="Fail (exit code 1) where the list on stdin is empty.")
    ] = RunOptions.require_frames
    reconnect_for: Annotated[
        float | None,
        _option(
            min=0,
            metavar="SECONDS",
            help="Try so long to get a lost camera or network stream back; 0: end there. Default: 60. Given, or with "
            "--resume, also at the start.",
        ),
    ] = None
    buffer: Annotated[
        Literal["latest", "all"] | None,
        _option(help="Frames of a live source that count when the model is slower. Default: latest."),
    ] = None

    def open(self, source: str, *, resume: bool) -> Stream:
        """The stream of a source's frames."""
        from remtta.streams.sources import open_stream

        return open_stream(
            source,
            sort=self.sort,
            frame_stride=self.frame_stride,
            limit=self.limit,
            null_separated=self.null,
            reconnect_for=self.reconnect_for,
            buffer=self.buffer,
            wait_at_start=self.reconnect_for is not None or resume,
        )

    def open_all(self, source: str, *, resume: bool) -> dict[str, Stream]:
        """The streams of a list of sources, by name; live ones that are not there yet are waited for."""
        from remtta.streams.lists import read_sources
        from remtta.streams.live import LiveOptions
        from remtta.streams.sources import open_streams

        if self.null or self.require_frames:
            raise UsageError("-0 and --require-frames are for paths on standard input, and --streams reads none")
        given = {"reconnect_for": self.reconnect_for, "buffer": self.buffer}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        live = LiveOptions(**chosen, wait_at_start=True)
        sources = read_sources(Path(source))
        return open_streams(
            sources, sort=self.sort, frame_stride=self.frame_stride, limit=self.limit, live=live, going_on=resume
        )
