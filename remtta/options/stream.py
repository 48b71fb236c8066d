"""Which frames of a source are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from remtta.errors import check_finite
from remtta.options.option import Option, check_options

_stream = partial(Option, panel="Stream")

Sort = Literal["name", "mtime", "none"]
Buffer = Literal["latest", "all"]

OPEN_TIMEOUT_S, READ_TIMEOUT_S = 15.0, 15.0


@dataclass(frozen=True)
class LiveOptions:
    """How a camera or a network stream is read.

    Attributes:
        reconnect_for: Seconds; 0 ends the stream at the first loss, which is an error where it is known not to be the
            source's own end.
        buffer: "latest" drops frames that the model is too slow for, oldest first; "all" has the source wait. A source
            that cannot wait then loses frames in its driver or on the network, or hangs up and is opened again.
        open_timeout_s: Seconds that a source may take to open.
        read_timeout_s: The same for a frame that can be decoded.
        wait_at_start: Wait for the source as long also before its first frame, in place of failing at once.
    """

    reconnect_for: Annotated[
        float,
        _stream(
            "Wait this long for a lost camera or network stream; 0: end there. If given, or with --resume, also at "
            "the start.",
            metavar="SECONDS",
            min=0,
            default="60",
            common=True,
            more="reliability.md#sources-that-fail",
        ),
    ] = 60.0
    buffer: Annotated[
        Buffer,
        _stream("Frames of a live source to use when the model is slower: the newest, or all.", default="latest"),
    ] = "latest"
    open_timeout_s: float = OPEN_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S
    wait_at_start: bool = False

    def __post_init__(self) -> None:
        check_finite(self.reconnect_for, "the seconds to reconnect for", ">= 0")
        check_options(self)


@dataclass(frozen=True)
class StreamOptions:
    """Which frames of a source, and in what order.

    `live` is how cameras and network streams are read; None for the defaults, which any source may have.
    """

    limit: Annotated[int | None, _stream("Stop after so many frames.", metavar="N", min=1, common=True)] = None
    frame_stride: Annotated[int, _stream("Take every K-th frame.", metavar="K", min=1, common=True)] = 1
    sort: Annotated[Sort, _stream("Order of a folder's or glob's files; by name: frame_2 before frame_10.")] = "name"
    null: Annotated[bool, _stream("Paths on standard input end in NUL.", flags=("--null", "-0"))] = False
    live: LiveOptions | None = None

    def __post_init__(self) -> None:
        check_options(self)
