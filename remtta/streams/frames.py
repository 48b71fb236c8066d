"""One frame of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class Frame:
    """A frame on its way to the model, not yet decoded.

    Attributes:
        source: Where it comes from: a path, or the video, camera or URL.
        load: Decode it to an upright RGB image; raises `FrameError`.
        number: Position in the video, from 0; None for stills.
        time_s: Time in the video, in seconds; None for stills.
    """

    source: str
    load: Callable[[], Image.Image]
    number: int | None = None
    time_s: float | None = None
