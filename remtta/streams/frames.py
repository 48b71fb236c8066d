"""The frames of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from remtta.errors import FrameError


@dataclass(frozen=True)
class Gap:
    """An interval without frames from a live source, or a restart of the times in a video."""

    seconds: float  # from the last frame before it to the first one after it
    reason: str
    attempts: int  # to open the source until it gave a frame again


class CannotOpen(OSError):
    """A video, camera or address cannot be opened; the message is the reason."""


@dataclass(frozen=True)
class Picture:
    """A picture as it comes from a video or camera."""

    size: tuple[int, int] | None  # width and height; None if it cannot be decoded
    load: Callable[[], Image.Image]  # converts it to an upright RGB image, or raises `FrameError`
    time_s: float = 0.0  # in a video; 0 from a camera
    gap: Gap | None = None  # a restart of the times just before it
    file: bytes | None = None  # of a still image at an address


def undecodable(time_s: float = 0.0, file: bytes | None = None) -> Picture:
    """Return a picture that cannot be decoded."""

    def load() -> Image.Image:
        raise FrameError("cannot be decoded")

    return Picture(None, load, time_s, file=file)


@dataclass(frozen=True)
class Frame:
    """A frame, not yet decoded."""

    source: str  # path of the image or video, or the camera or URL
    load: Callable[[], Image.Image]  # decodes it to an upright RGB image, or raises `FrameError`
    number: int | None = None  # index in the video, or of the frames received live, from 0; None for stills
    time_s: float | None = None  # in the video, or since the first live frame; None for stills
    gap: Gap | None = None  # the gap that it ended
    read_at: str | None = None  # from a live source: UTC, ISO 8601 to the millisecond
