"""Pillow with reproducible format detection and bounds on the cost of a file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImagePalette, PngImagePlugin, TiffImagePlugin, _imaging

from remtta.errors import FrameError

MAX_PIXELS = 2 * (Image.MAX_IMAGE_PIXELS or 89_478_485)
"""Larger images are rejected as decompression bombs (Pillow's own limit)."""

_MIB = 2**20
_CHUNK_BYTES = 65_536
MAX_READS = 4_000_000  # a few seconds of a decoder that reads byte by byte
MAX_SECONDS = 120.0  # of CPU time, without waits for a slow disk
_MAX_HEADER_BYTES = 256 * _MIB  # WebP and AVIF are read completely before their size is known
_BLOCK_BYTES = 64 * _MIB  # glibc returns blocks above 32 MiB to the system; smaller ones stay with their thread
_MAX_BYTES_PER_PIXEL = 32
_UNLIMITED_READS = ("QOI", "DDS")  # decoded in Python, reading no more than that
_NATIVE_MODES = {"F;32BF": "F;32NF", "I;32BS": "I;32NS", "I;16BS": "I;16NS"}
_NEW_SUBFILE_TYPE, _SUBFILE_TYPE, _SUB_IFDS = 254, 255, 330  # tags of a TIFF
_JPEG2000_START = b"\xff\x4f\xff\x51"  # the sizes and the samples' bits follow
MAX_SCANNED_PIXELS = 5_000_000_000  # of a progressive JPEG, each of whose scans covers the whole image
_PNG_METADATA = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")  # skipped, as Pillow refuses images in which these are large
_XMP, _MAX_XMP_BYTES = b"XML:com.adobe.xmp\0", 2**20  # the iTXt that may hold the orientation
_EXCLUDED_FORMATS = {
    *("BUFR", "GRIB", "HDF5", "MPEG"),  # which Pillow only recognises
    "EPS",  # a program, which Ghostscript would run
    "IPTC",  # contains an image of any format and size
}


@functools.cache
def load_plugins() -> None:
    """Load all Pillow plugins, and make it return the memory of large images.

    By default Pillow loads some plugins at first and the rest on demand, so how a file without a signature, e.g. a TGA,
    is opened would depend on the files before it.
    """
    Image.init()
    _add_tiff_modes()
    _imaging.set_block_size(_BLOCK_BYTES)
    with contextlib.suppress(OSError, AttributeError):  # linked differently: libtiff keeps printing
        # libtiff prints to standard error, bypassing Python; Pillow raises the errors that matter.
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.restype = ctypes.c_void_p
        set_handler(None)


def _add_tiff_modes() -> None:
    """Let Pillow read greys of more than 8 bits in both byte orders, and with zero as black or white."""
    kinds = TiffImagePlugin.OPEN_INFO
    kinds.setdefault((b"MM", 1, (1,), 1, (12,), ()), ("I;16", "I;12"))
    kinds.setdefault((b"MM", 1, (1,), 1, (32,), ()), ("I", "I;32BS"))
    for (order, zero, *kind), modes in list(kinds.items()):
        if zero == 1 and modes[0].startswith(("I", "F")):
            kinds.setdefault((order, 0, *kind), modes)  # type: ignore[arg-type]


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats in the order in which they are tried, those without a signature last."""
    load_plugins()
    return tuple(sorted(Image.OPEN.keys() - _EXCLUDED_FORMATS, key=lambda name: (Image.OPEN[name][1] is None, name)))


@contextlib.contextmanager
def open_image(path: Path) -> Iterator[Image.Image]:
    """Open an image and read its header; its pixels are read on demand.

    Raises:
        FrameError: If it is not a regular file, too large, or too costly to read.
        Exception: Any that Pillow raises on damaged data.
    """
    if not stat.S_ISREG(mode := path.stat().st_mode):
        is_folder = stat.S_ISDIR(mode)
        raise FrameError("a folder; name the images in it" if is_folder else "not a regular file")
    with _LimitedFile(path) as file, Image.open(file, formats=formats()) as image:
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _mend_tiff(image)
        if isinstance(image, PngImagePlugin.PngImageFile):
            _mend_png(image)
        if image.width * image.height > MAX_PIXELS:
            raise FrameError(
                f"{image.width}x{image.height} pixels is over the limit of {MAX_PIXELS} (decompression bomb?)"
            )
        if image.tile and image.tile[0][0] == "fits_gzip":  # decoded in Python, in ten times the memory of its pixels
            raise FrameError("a compressed FITS file; decompress it (funpack)")
        file.header_is_read(image)
        yield image


def _mend_tiff(image: TiffImagePlugin.TiffImageFile) -> None:
    """Go to the page with the picture, and mend what Pillow mistakes in its header."""
    if _is_thumbnail_or_mask(image):
        if _SUB_IFDS in image.tag_v2:
            raise FrameError("a raw file of a camera, of which Pillow would read a thumbnail; convert it")
        _seek_picture(image)
    colours = image.tag_v2.get(TiffImagePlugin.COLORMAP)
    if image.mode in ("P", "PA") and colours and max(colours) < 256:  # of 8 bits instead of 16, as libtiff decides, too
        image.palette = ImagePalette.raw("RGB;L", bytes(colours))
    raw_modes: dict[str, str] = {}
    if image.tile and image.tile[0][0] == "libtiff":  # which swaps bytes itself, while Pillow does it once more
        raw_modes = _NATIVE_MODES
    elif 16 in image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, ()):  # Pillow takes separate bands for 8-bit ones
        end = ";16L" if image.tag_v2.prefix == b"II" else ";16B"
        raw_modes = {band: band + end for band in "RGBACMYK"}
    if raw_modes:
        image.tile = [
            tile._replace(args=tuple(raw_modes.get(value, value) for value in tile.args or ())) for tile in image.tile
        ]


def _seek_picture(image: TiffImagePlugin.TiffImageFile) -> None:
    """Go to the first page that is neither a thumbnail nor a mask; if all are marked as such, to the largest."""
    areas: list[int] = []
    for page in range(image.n_frames):
        image.seek(page)
        if not _is_thumbnail_or_mask(image):
            return
        areas.append(image.width * image.height)
    image.seek(areas.index(max(areas)))


def _is_thumbnail_or_mask(image: TiffImagePlugin.TiffImageFile) -> bool:
    return bool(image.tag_v2.get(_NEW_SUBFILE_TYPE, 0) & 5) or image.tag_v2.get(_SUBFILE_TYPE) == 2


def _mend_png(image: PngImagePlugin.PngImageFile) -> None:
    """Scale a transparent grey or colour as Pillow scales the pixels: to 8 bits, or not at all."""
    scale = {"L;2": 85.0, "L;4": 17.0, "RGB;16B": 1 / 256}.get(str(image.tile[0].args) if image.tile else "")
    transparent = image.info.get("transparency")
    if scale and isinstance(transparent, int):
        image.info["transparency"] = int(transparent * scale)
    elif scale and isinstance(transparent, tuple):
        image.info["transparency"] = tuple(int(value * scale) for value in transparent)


def high_depth_jpeg2000(image: Image.Image) -> bytes | None:
    """Return the content of an open JPEG 2000 of more than 8 bits that Pillow decodes to 8, at which its white wraps to
    black; None for any other image.
    """
    if image.format != "JPEG2000" or image.mode.startswith("I;16"):
        return None
    file: io.BufferedReader = image.fp  # type: ignore[attr-defined]
    file.seek(0)
    content = file.read()
    return content if _jpeg2000_bits(content) > 8 else None


def _jpeg2000_bits(content: bytes) -> int:
    start = content.index(_JPEG2000_START)
    (count,) = struct.unpack_from(">H", content, start + 40)
    return max(1 + (depth & 0x7F) for depth in content[start + 42 : start + 42 + 3 * count : 3])


def decode_high_depth(content: bytes) -> Image.Image:
    """Decode what `high_depth_jpeg2000` returned to 8 bits, by OpenCV; Pillow must have found the announced size."""
    from remtta.streams.capture import load_opencv  # which imports images

    cv2 = load_opencv("JPEG 2000 of more than 8 bits", FrameError)
    samples = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if samples is None:
        raise FrameError("a JPEG 2000 of more than 8 bits that OpenCV cannot read; convert it to PNG")
    levels = cv2.convertScaleAbs(samples, alpha=255 / (2 ** _jpeg2000_bits(content) - 1))
    return Image.fromarray(levels if levels.ndim == 2 else levels[..., [2, 1, 0, 3][: levels.shape[2]]])


class _LimitedFile(io.BufferedReader):
    """A file that raises FrameError if a decoder reads too much of it, or takes too long."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self._size = os.fstat(self.fileno()).st_size
        self._reads_left, self._bytes_left = MAX_READS, _MAX_HEADER_BYTES
        self._scans_left: int | None = None
        self._began = time.thread_time()
        self._is_png = self.peek(8).startswith(b"\x89PNG")

    def header_is_read(self, image: Image.Image) -> None:
        """Limit further reads according to the number of pixels."""
        pixels = image.width * image.height
        self._bytes_left = _MAX_HEADER_BYTES + _MAX_BYTES_PER_PIXEL * pixels
        if image.format in _UNLIMITED_READS:
            self.read = super().read  # type: ignore[method-assign]
        if image.info.get("progressive"):
            self._scans_left = MAX_SCANNED_PIXELS // pixels

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _CHUNK_BYTES:
            remaining = max(0, self._size - self.tell())
            size = remaining if size is None or size < 0 else min(size, remaining)
        self._count(size)
        data = super().read(size)
        while self._is_png and len(data) == 8 and data[4:] in _PNG_METADATA:
            if self.peek(len(_XMP)).startswith(_XMP) and int.from_bytes(data[:4]) <= _MAX_XMP_BYTES:
                break
            self.seek(int.from_bytes(data[:4]) + 4, os.SEEK_CUR)  # over the chunk and its checksum
            self._count(len(data))
            data = super().read(size)
        if self._scans_left is not None:
            self._scans_left -= data.count(b"\xff\xda")
            self._refuse_if(self._scans_left < 0)
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(_CHUNK_BYTES if size is None or size < 0 else min(size, _CHUNK_BYTES))
        self._count(len(line))
        return line

    def _count(self, num_bytes: int) -> None:
        self._reads_left -= 1
        self._bytes_left -= num_bytes
        self._refuse_if(self._reads_left < 0 or self._bytes_left < 0)
        if time.thread_time() - self._began > MAX_SECONDS:
            raise FrameError(f"it takes more than {MAX_SECONDS:.0f} s to decode")

    def _refuse_if(self, too_much: bool) -> None:
        if too_much:
            raise FrameError("too much of it has to be read for the image in it; it is damaged or malicious")
