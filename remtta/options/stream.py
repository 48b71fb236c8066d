"""Options of a stream: which frames of a source are read, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.options.option import check_options, in_stream

Sort = Literal["name", "mtime", "none"]
Buffer = Literal["latest", "all"]

OPEN_TIMEOUT_S, READ_TIMEOUT_S = 15.0, 15.0


@dataclass(frozen=True)
class LiveOptions:
    """Options of a camera or a network stream.

    Attributes:
        reconnect_for: Seconds; 0 ends the stream at the first loss, which is an error if the source is known not to
            have ended by itself.
        buffer: "latest" drops frames for which the model is too slow, oldest first; "all" makes the source wait. A
            source that cannot wait then loses frames in its driver or on the network, or disconnects and is opened
            again.
        poll: Seconds between requests of an address that serves a still image; by default 1 if it ends like one.
        open_timeout_s: Seconds that a source may take to open.
        read_timeout_s: Seconds without a decodable frame.
        wait_at_start: Also wait for the source before its first frame, instead of failing at once.
    """

    reconnect_for: Annotated[
        float,
        in_stream(
            "Seconds to wait for a lost camera or network stream; 0 ends the run. If set, or with --resume or "
            "--streams, also wait for a source that is missing at the start.",
            metavar="SECONDS",
            min=0,
            below=math.inf,
            default="60",
            common=True,
            more="reliability.md#sources-that-fail",
        ),
    ] = 60.0
    buffer: Annotated[
        Buffer, in_stream("Which frames of a live source to use if it is faster than the model.", default="latest")
    ] = "latest"
    poll: Annotated[
        float | None,
        in_stream(
            "Seconds between requests of an http:// address that serves a still image; an unchanged one is used once.",
            metavar="SECONDS",
            above=0,
            below=math.inf,
            default="1 for .jpg, .png, ...; else a video is expected",
        ),
    ] = None
    open_timeout_s: float = OPEN_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S
    wait_at_start: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The frames of a source to read, and their order.

    `live` are the options of cameras and network streams; None for the defaults, which are valid for any source.
    """

    limit: Annotated[int | None, in_stream("Use at most N frames.", metavar="N", min=1, common=True)] = None
    frame_stride: Annotated[int, in_stream("Use every K-th frame.", metavar="K", min=1, common=True)] = 1
    sort: Annotated[Sort, in_stream("Order of the files in a folder or glob; name puts frame_2 before frame_10.")] = (
        "name"
    )
    null: Annotated[bool, in_stream("Paths on standard input end in NUL, not newline.", flags=("--null", "-0"))] = False
    live: LiveOptions | None = None

    def __post_init__(self) -> None:
        check_options(self)
