"""Thumbnails of frames and plots, small enough for the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from remtta.errors import FrameError
from remtta.runs.reading import Row
from remtta.streams.images import load_image

_THUMB = 160
_MAX_WIDE = 1_200
STILLS = ("folder", "glob", "image", "paths")
"""Kinds of sources whose frames are image files that can be opened again."""


def thumbnails(rows: Sequence[Row]) -> list[str | None]:
    """Return a thumbnail of each row's frame as a data URL, if it is an image file that can still be read."""
    return [_address_of(Path(row["source"]), _THUMB) if row.get("frame") is None else None for row in rows]


def picture(path: Path) -> str | None:
    """Return a plot as a data URL, if the file exists."""
    return _address_of(path, _MAX_WIDE) if path.is_file() else None


def _address_of(path: Path, side: int) -> str | None:
    """Return a downscaled image as a data URL."""
    try:
        image = load_image(path)
    except FrameError:
        return None
    image.thumbnail((side, side * 4 if side == _MAX_WIDE else side), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
