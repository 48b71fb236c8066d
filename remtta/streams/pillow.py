"""Pillow with reproducible format detection and bounds on the cost of a file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, _imaging

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
    _imaging.set_block_size(_BLOCK_BYTES)
    with contextlib.suppress(OSError, AttributeError):  # linked differently: libtiff keeps printing
        # libtiff prints to standard error, bypassing Python; Pillow raises the errors that matter.
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
        set_handler.restype = ctypes.c_void_p
        set_handler(None)


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats in the order in which they are tried, those without a signature last."""
    load_plugins()
    return tuple(sorted(Image.OPEN.keys() - _EXCLUDED_FORMATS, key=lambda name: (Image.OPEN[name][1] is None, name)))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    """Open an image and read its header; its pixels are read on demand.

    Raises:
        FrameError: If it is not a regular file, too large, or too costly to read.
        Exception: Any that Pillow raises on damaged data.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise FrameError("not a regular file")
    with _LimitedFile(path) as file, Image.open(file, formats=formats()) as image:
        if image.width * image.height > MAX_PIXELS:
            raise FrameError(
                f"{image.width}x{image.height} pixels is over the limit of {MAX_PIXELS} (decompression bomb?)"
            )
        if image.tile and image.tile[0][0] == "fits_gzip":  # decoded in Python, in ten times the memory of its pixels
            raise FrameError("a compressed FITS file; decompress it (funpack)")
        if image.tile and image.tile[0][0] == "libtiff":  # which swaps bytes itself, while Pillow does it once more
            image.tile = [
                tile._replace(args=tuple(_NATIVE_MODES.get(value, value) for value in tile.args or ()))
                for tile in image.tile
            ]
        file.header_is_read(image)
        yield image


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
