"""Thumbnails of frames and plots, small enough for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image

from remtta.errors import FrameError
from remtta.runs.reading import Row
from remtta.streams.images import load_image

_THUMB = 160
_MAX_WIDE = 1_200
STILLS = ("folder", "glob", "image", "paths")
"""Kinds of sources whose frames are image files that can be opened again."""

Look = Callable[[Sequence[Row]], list[tuple[str, ...]]]
"""A function that returns data URLs of thumbnails of each row's frame; empty if it cannot be read again."""


def thumbnails(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return a thumbnail of each row's frame, if it is an image file."""
    return [_of_file(Path(row["source"]), _THUMB) if row.get("frame") is None else () for row in rows]


def picture(path: Path) -> tuple[str, ...]:
    """Return a plot as a data URL, if the file exists."""
    return _of_file(path, _MAX_WIDE) if path.is_file() else ()


def _of_file(path: Path, side: int) -> tuple[str, ...]:
    try:
        return (address_of(load_image(path), side),)
    except FrameError:
        return ()


def address_of(image: Image.Image, side: int = _THUMB) -> str:
    """Return a downscaled image as a data URL."""
    image.thumbnail((side, side * 4 if side == _MAX_WIDE else side), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
