"""Stills: find them in natural order, decode them to upright 8-bit RGB."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from remtta.errors import FrameError

Sort = Literal["name", "mtime", "none"]

_log = logging.getLogger("remtta")

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Larger images are refused as decompression bombs (Pillow's own limit)."""

_NOT_STILLS = frozenset({".pdf", ".ps", ".eps", ".mpg", ".mpeg", ".hdf", ".h5", ".grib", ".bufr"})


def image_suffixes() -> frozenset[str]:
    """File name endings, in lower case, of the still images that Pillow reads."""
    readable = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    return frozenset(readable) - _NOT_STILLS


def natural_key(path: str) -> tuple[list[list[str | int]], str]:
    """Sort key under which frame_2 comes before frame_10, folder by folder."""
    parts: list[list[str | int]] = [
        # Only ASCII digits become numbers, as in the split: text and numbers must alternate to compare.
        [int(part) if position % 2 else part.casefold() for position, part in enumerate(re.split(r"([0-9]+)", name))]
        for name in path.split(os.sep)
    ]
    return parts, path


def list_files(folder: Path, suffixes: Collection[str], sort: Sort) -> list[Path]:
    """Regular files under a folder with one of these endings, recursively.

    Linked folders are followed, each folder once. Named pipes, sockets and
    devices are left out, so nothing can hang.
    """

    def report(error: OSError) -> None:
        _log.warning("skipping the folder %s: %s", error.filename, error.strerror)

    found: list[Path] = []
    walked = {os.path.realpath(folder)}
    for root, below, names in os.walk(folder, onerror=report, followlinks=True):
        paths = (Path(root, name) for name in names if has_suffix(name, suffixes))
        found += (path for path in paths if path.is_file())
        for name in sorted(below):
            place = os.path.realpath(os.path.join(root, name))
            if place in walked:  # a loop of links, or a second way to the same folder
                below.remove(name)
            walked.add(place)
    return sort_files(iter(found), sort)


def has_suffix(path: str, suffixes: Collection[str]) -> bool:
    """Whether a file's name ends in one of these, in upper or lower case."""
    return os.path.splitext(path)[1].lower() in suffixes


def sort_files(paths: Iterator[Path], sort: Sort) -> list[Path]:
    """Put files in natural, modification-time or as-found order."""
    if sort == "none":
        return list(paths)
    if sort == "mtime":
        return sorted(paths, key=lambda path: (_mtime_ns(path), natural_key(str(path))))
    return sorted(paths, key=lambda path: natural_key(str(path)))


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed: it will be reported as a frame that cannot be read
        return 0


def load_image(path: Path) -> Image.Image:
    """Decode one still to upright RGB.

    EXIF orientation is applied, transparency is laid on white, 16-bit and
    float samples are scaled to 8 bit; of an animation the first frame is taken.

    Raises:
        FrameError: If the file is missing, no image, truncated, or too large.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FrameError("not a regular file")
        with Image.open(path) as image:
            if image.width * image.height > MAX_PIXELS:
                raise FrameError(
                    f"{image.width}x{image.height} pixels is over the limit of {MAX_PIXELS} (decompression bomb?)"
                )
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except FrameError:
        raise
    except UnidentifiedImageError as error:
        raise FrameError("not an image that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise FrameError(f"too large: {error}") from error
    except FileNotFoundError as error:
        raise FrameError("no such file") from error
    except Exception as error:  # Pillow's decoders raise many types on damaged data
        raise FrameError(f"cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode to 8-bit RGB."""
    if image.mode == "RGB" and not image.has_transparency_data:  # RGB may have a transparent colour
        return image
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_eight_bits(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float greys; the range is taken from the mode, else from the values."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if image.mode.startswith("I;16"):
        full = 65535.0
    else:
        peak = float(values.max(initial=0.0))
        full = next((limit for limit in (1.0, 255.0, 65535.0) if image.mode == "F" or limit > 1 if peak <= limit), peak)
    return Image.fromarray((values / full * 255).round().clip(0, 255).astype(np.uint8))
