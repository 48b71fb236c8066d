"""One frame of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class Gap:
    """A time without frames from a live source.

    Attributes:
        seconds: From the last frame before it to the first one after it.
        reason: What was lost.
        attempts: How often the source was opened until it gave a frame again.
    """

    seconds: float
    reason: str
    attempts: int


@dataclass(frozen=True)
class Frame:
    """A frame on its way to the model, not yet decoded.

    Attributes:
        source: Where it comes from: a path, or the video, camera or URL.
        load: Decode it to an upright RGB image; raises `FrameError`.
        number: Position in the video, from 0; None for stills.
        time_s: Time in the video, in seconds; None for stills.
        gap: The time without frames that it ended, if it did.
        read_at: When it was read from a live source: UTC, ISO 8601 to the millisecond.
    """

    source: str
    load: Callable[[], Image.Image]
    number: int | None = None
    time_s: float | None = None
    gap: Gap | None = None
    read_at: str | None = None
