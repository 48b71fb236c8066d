"""Decode stills to upright 8-bit RGB."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from remtta.errors import FrameError
from remtta.streams.decoding_memory import CURRENT_MEMORY, PictureMemory
from remtta.streams.pillow import decode_high_depth, formats, high_depth_jpeg2000, open_image

_log = logging.getLogger(__name__)

BAND_PIXELS = 2**18
MIN_REDUCED_SIDE = 1024  # pixels of the short side: more than models use

_SAMPLE_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # else 4: Pillow pads to that
_DECODER_BYTES = {"PNG": 0, "JPEG": 0, "MPO": 0, "GIF": 0, "BMP": 0, "TGA": 0, "AVIF": 10, "WEBP": 14, "JPEG2000": 22}
"""Measured bytes per pixel that decoders need in addition to the image; others keep a copy or two."""
_HIGH_DEPTH_BYTES = 30  # more for a JPEG 2000 of more than 8 bits, which is decoded again

_OPENED_AS = {"MPO": "JPEG"}  # several JPEGs in one file, of which the first is used


def image_suffixes() -> frozenset[str]:
    """Return the lower-case suffixes of the still images that Pillow reads."""
    extensions, readable = Image.registered_extensions().items(), formats()
    return frozenset(suffix for suffix, format in extensions if _OPENED_AS.get(format, format) in readable)


def has_suffix(path: str, suffixes: Collection[str]) -> bool:
    """Return True if a file name ends in one of these suffixes, ignoring case."""
    return os.path.splitext(path)[1].lower() in suffixes


def is_image(path: Path) -> bool:
    """Return False for a file whose header is that of no image."""
    try:
        with open_image(path):
            return True
    except UnidentifiedImageError:
        return False
    except Exception as error:  # reported when it is decoded
        _log.debug("%s: %s", path, error)
        return True


def load_image(path: Path) -> Image.Image:
    """Decode a still to upright RGB.

    Applies the EXIF orientation, composites transparency on white, scales 16-bit and float samples to 8 bit, and uses
    the first frame of an animation. Within a `PictureMemory`, a JPEG that would exceed it is decoded at a half, a
    quarter or an eighth of its size. Raise FrameError if the file is missing, not an
    image, truncated, or too large.
    """
    try:
        with open_image(path) as image:
            content = high_depth_jpeg2000(image)
            if memory := CURRENT_MEMORY.get():
                _reserve(memory, image, high_depth=content is not None)
            image.load()
            if content is not None:
                return to_rgb(decode_high_depth(content))
            if _is_rotated(image):
                ImageOps.exif_transpose(image, in_place=True)
            return to_rgb(image)
    except FrameError:
        raise
    except UnidentifiedImageError as error:
        raise FrameError("not an image that Pillow can read") from error
    except Image.DecompressionBombError as error:
        raise FrameError(f"too large: {error}") from error
    except FileNotFoundError as error:
        raise FrameError("no such file") from error
    except PermissionError as error:
        raise FrameError("permission denied") from error
    except Exception as error:  # Pillow's decoders raise many types on damaged data
        raise FrameError(f"cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def _reserve(memory: PictureMemory, image: Image.Image, high_depth: bool) -> None:
    """Reserve memory for decoding; if the full size exceeds it, at a reduced one where that is possible."""
    width, height = image.size[:2]
    cost = _bytes_per_pixel(image) + _HIGH_DEPTH_BYTES * high_depth
    if not high_depth and not memory.fits(width, height, cost) and image.format in ("JPEG", "MPO", "JPEG2000"):
        for power in (1, 2, 3):
            smaller = -(-width >> power), -(-height >> power)
            if min(smaller) >= MIN_REDUCED_SIDE and memory.fits(*smaller, cost):
                if image.format == "JPEG2000":
                    image.reduce = power  # type: ignore[method-assign, assignment]  # a property there
                else:
                    image.draft(image.mode, (width >> power, height >> power))
                    smaller = image.size
                width, height = smaller
                break
    memory.reserve(width, height, cost)


def _bytes_per_pixel(image: Image.Image) -> int:
    """Return the maximum bytes per pixel for decoding an image and converting it to RGB."""
    decoded = _SAMPLE_BYTES.get(image.mode, 4)
    decoder = _DECODER_BYTES.get(image.format or "", 8)
    if image.info.get("progressive"):  # all coefficients are kept until the last scan
        decoder = 2 * len(image.getbands())
    # Check for "exif" first: reading a PNG's EXIF would decode it.
    rotated = decoded if "exif" in image.info and _is_rotated(image) else 0
    converted = 0 if image.mode == "RGB" and not image.has_transparency_data else 4
    return decoded + max(decoder, rotated, converted)


def _is_rotated(image: Image.Image) -> bool:
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except Exception as error:  # damaged EXIF data say nothing of the pixels
        _log.debug("EXIF data are damaged: %s", error)
        return False


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow mode to 8-bit RGB."""
    if image.mode == "RGB" and not image.has_transparency_data:  # RGB may have a transparent colour
        return image
    if image.mode.startswith("I") or image.mode == "F":
        transparent = image.info.get("transparency")  # a grey of a PNG; unused if all pixels have it
        if transparent is not None and image.getextrema() == (transparent, transparent):
            transparent = None
        convert = partial(
            _to_eight_bits,
            dtype=_dtype(image),
            white_level=_white_level(image),
            is_negative=_tiff_tag(image, "PHOTOMETRIC_INTERPRETATION") == 0,
            transparent=transparent,
        )
        return _in_bands(image, convert)
    if image.mode == "La":  # premultiplied greys, which Pillow converts to nothing else
        image = image.convert("LA")
    # Alpha that is zero everywhere is unused, as in many 32-bit BMP files: the colours are meant to be seen.
    if image.has_transparency_data and any(band.convert("RGBA").getchannel("A").getbbox() for band, _ in _bands(image)):
        return _in_bands(image, _on_white)
    return image.convert("RGB")


def _in_bands(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert a few rows at a time to keep intermediate copies small."""
    if image.width * image.height <= BAND_PIXELS:
        return convert(image)
    converted = Image.new("RGB", image.size)
    for band, top in _bands(image):
        converted.paste(convert(band), (0, top))
    return converted


def _bands(image: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    rows = max(1, BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height))), top


def _on_white(image: Image.Image) -> Image.Image:
    layer = image.convert("RGBA")
    white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, layer).convert("RGB")


def _dtype(image: Image.Image) -> type[np.generic] | None:
    """Return the type of greys that Pillow reads as another: it reads unsigned 32-bit ones of a TIFF as signed."""
    unsigned = (_tiff_tag(image, "BITSPERSAMPLE"), _tiff_tag(image, "SAMPLEFORMAT") or (1,)) == ((32,), (1,))
    return np.uint32 if unsigned else None


def _white_level(image: Image.Image) -> float:
    """Return the white level of greys beyond 8 bits: from the mode or a TIFF's tags if they imply one, else from the
    values.
    """
    bits = (_tiff_tag(image, "BITSPERSAMPLE") or (16,))[0]
    if image.mode.startswith("I;16"):
        return 2.0**bits - 1
    signed = bits == 16 and _tiff_tag(image, "SAMPLEFORMAT") == (2,)
    limits = (1.0, 255.0, 2.0**15 - 1 if signed else 2.0**16 - 1)
    dtype = _dtype(image)
    peak = max(float(_values(band, dtype).max(initial=0.0)) for band, _ in _bands(image))
    return next((limit for limit in limits if image.mode == "F" or limit > 1 if peak <= limit), peak)


def _tiff_tag(image: Image.Image, name: str) -> Any:
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return None
    return image.tag_v2.get(getattr(TiffImagePlugin, name))


def _values(image: Image.Image, dtype: type[np.generic] | None) -> NDArray[np.float64]:
    """Return greys (H, W), read as another type of the same size if one is given."""
    values = np.asarray(image)
    values = values if dtype is None else values.view(dtype)
    return np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


def _to_eight_bits(
    image: Image.Image,
    *,
    dtype: type[np.generic] | None,
    white_level: float,
    is_negative: bool,
    transparent: float | None,
) -> Image.Image:
    """Convert greys to RGB; in a negative, such as a TIFF whose zero is white, white becomes black. The transparent
    grey becomes white.
    """
    values = _values(image, dtype)
    levels = (values / white_level * 255).round().clip(0, 255).astype(np.uint8)
    levels = 255 - levels if is_negative else levels
    if transparent is not None:
        levels[values == transparent] = 255
    return Image.fromarray(levels).convert("RGB")
