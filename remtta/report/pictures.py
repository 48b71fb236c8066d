"""Frames and an evaluation's picture of masks, small enough for the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

from remtta.errors import FrameError
from remtta.runs.reading import Row
from remtta.streams.images import load_image

_THUMB = 160
_MOST_WIDE = 1_200
STILLS = ("folder", "glob", "image", "paths")
"""Kinds of sources whose frames are files that can be looked at again."""


def thumbnail(row: Row) -> str | None:
    """A frame as the address of a small picture; None where it cannot be read any more."""
    return _address(Path(row["source"]), _THUMB) if row.get("frame") is None else None


def picture(path: Path) -> str | None:
    """A picture as an address; None where there is none."""
    return _address(path, _MOST_WIDE) if path.is_file() else None


def _address(path: Path, side: int) -> str | None:
    try:
        image = load_image(path)
    except FrameError:
        return None
    image.thumbnail((side, side * 4 if side == _MOST_WIDE else side), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    image.save(content, format="JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"
