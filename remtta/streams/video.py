"""Video through OpenCV: files, and functions shared with live sources."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from PIL import Image

from remtta.errors import FrameError, StreamError, without_password
from remtta.options.stream import OPEN_TIMEOUT_S, READ_TIMEOUT_S
from remtta.streams.decoding_budget import CURRENT_SHARE
from remtta.streams.frames import Frame, Gap
from remtta.streams.opencv import bound_allocations, load_opencv

_CONTAINERS = "mp4 m4v mov avi mkv webm mpg mpeg ts mts m2ts wmv flv 3gp ogv"
VIDEO_SUFFIXES = frozenset("." + name for name in _CONTAINERS.split(" "))
_FRAME_BYTES = 7  # per pixel: as RGB array and as image
MAX_REFUSED = 30
"""Number of consecutive reads that may fail: OpenCV fails once for each packet that its decoder rejects."""


_log = logging.getLogger("remtta")


def iter_video(source: str, *, stride: int = 1) -> Iterator[Frame]:
    """Yield every stride-th frame of a video file; raise StreamError if it cannot be opened, or has no frame."""
    cv2 = load_opencv("video", StreamError)
    capture = open_capture(source)
    try:
        if not capture.isOpened():
            raise StreamError(cannot_open(source))
        number = refused = 0
        time_s: float | None = None
        promised = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        while refused < MAX_REFUSED and (refused == 0 or number + refused <= promised):
            if not capture.grab():
                refused += 1
                continue
            for _ in range(refused):  # frames that the decoder rejected; the video goes on
                if number % stride == 0:
                    time_s = _later_s(cv2, capture, time_s, stride)
                    yield video_frame(cv2, source, None, number, time_s)
                number += 1
            refused = 0
            if number % stride == 0:
                decoded, pixels = capture.retrieve()
                time_s = position_s(cv2, capture, time_s, stride)
                yield video_frame(cv2, source, pixels if decoded else None, number, time_s)
            number += 1
        if number == 0:
            raise StreamError(f"{source}: no frame could be decoded; {no_frame_advice(source, codec_of(cv2, capture))}")
        warn_if_cut(source, number, promised)
    finally:
        capture.release()


def position_s(cv2: Any, capture: Any, before_s: float | None, stride: int) -> float:
    """Return the time of the frame just read, `stride` frames after the one at `before_s`, if there was one."""
    time_s = float(capture.get(cv2.CAP_PROP_POS_MSEC)) / 1000
    return time_s or _later_s(cv2, capture, before_s, stride)  # e.g. AVI: the last frames have no time


def _later_s(cv2: Any, capture: Any, before_s: float | None, stride: int) -> float:
    return 0.0 if before_s is None else before_s + stride / (capture.get(cv2.CAP_PROP_FPS) or 1)


def warn_if_cut(name: str, num_frames: int, promised: int) -> None:
    """Warn that a video ended before the number of frames in its header, or that OpenCV estimates from its length."""
    if promised > num_frames + 1:  # headers often count one frame too many
        text = "%s ended after %d of about %d frames; it may be truncated or damaged, or its frame rate may vary"
        _log.warning(text, name, num_frames, promised)


def video_frame(
    cv2: Any,
    name: str,
    pixels: Any | None,
    number: int,
    time_s: float,
    gap: Gap | None = None,
    read_at: str | None = None,
) -> Frame:
    """Return a video frame from OpenCV's pixels, (H, W, 3) in BGR, or None if it could not be decoded."""

    def load() -> Image.Image:
        if pixels is None:
            raise FrameError("cannot be decoded")
        if share := CURRENT_SHARE.get():
            share.reserve(pixels.shape[1], pixels.shape[0], _FRAME_BYTES)
        return Image.fromarray(cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB))

    return Frame(name, load, number, round(max(time_s, 0.0), 6), gap, read_at)


def open_capture(
    source: str | int, open_timeout_s: float = OPEN_TIMEOUT_S, read_timeout_s: float = READ_TIMEOUT_S
) -> Any:
    """Return a `cv2.VideoCapture` of a path, camera or URL, with FFmpeg's timeouts; it may not be open. Raise
    StreamError if OpenCV cannot be loaded, or cannot take the name.
    """
    cv2 = load_opencv("video", StreamError)
    if isinstance(source, int):
        return cv2.VideoCapture(source)
    _require_utf8(source)
    bound_allocations(cv2)
    open_ms, read_ms = round(1000 * open_timeout_s), round(1000 * read_timeout_s)
    timeouts = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, open_ms, cv2.CAP_PROP_READ_TIMEOUT_MSEC, read_ms]
    if "://" not in source:
        source = os.path.join(".", source)  # else FFmpeg takes the 10 of 10:30.mp4 as a protocol
    capture = cv2.VideoCapture(source, cv2.CAP_FFMPEG, timeouts)
    # Files unknown to FFmpeg (image sequences, odd builds) may open with another backend.
    return capture if capture.isOpened() or "://" in source else cv2.VideoCapture(source)


def _require_utf8(source: str) -> None:
    try:
        source.encode()
    except UnicodeEncodeError as error:  # OpenCV would crash the process
        name = without_password(source)
        raise StreamError(f"{name} cannot be opened as a video: its name is not valid UTF-8; rename it") from error


def cannot_open(source: str | int, why: str | None = None) -> str:
    """Return the message for a source that did not open; `why` is the reason, if known."""
    if isinstance(source, int):
        return f"camera {source} cannot be opened; check that it is connected and not in use"
    source = without_password(source)
    if "://" in source:
        because = f" ({why})" if why else ""
        advice = "check the address, the network, and that a video is served there"
        return f"{source} cannot be opened as a video{because}; {advice}"
    return (
        f"{source} cannot be opened as a video; it may be truncated (an MP4 without its end cannot be read), or of a "
        "format OpenCV does not read (ffmpeg -i INPUT -c:v libx264 out.mp4 converts it)"
    )


def codec_of(cv2: Any, capture: Any) -> str:
    """Return the four-letter code of a video's codec, e.g. "AV01"; empty if it has none."""
    code = int(capture.get(cv2.CAP_PROP_FOURCC))
    letters = code.to_bytes(4, "little").decode("ascii", "replace") if 0 < code < 2**32 else ""
    return letters.strip() if letters.isascii() and letters.isprintable() else ""


def no_frame_advice(name: str, codec: str) -> str:
    """Return advice on a source that opened but gave no frame."""
    if codec:
        return (
            f"it is damaged, or OpenCV cannot decode {codec}: convert it (ffmpeg -i INPUT -c:v libx264 out.mp4), "
            f"or {'have the server send H.264 and allow seeking' if '://' in name else 'check that it is whole'}"
        )
    if "://" in name:  # an MP4 with its index at the end needs a server that can seek
        return "check that it is a video, or download it first"
    return "check that it is a video"
