"""A limit on the memory for decoding a picture: a file of kilobytes may decode to gigabytes."""

from __future__ import annotations

import contextlib
import threading
from contextvars import ContextVar

from remtta.errors import FrameError
from remtta.machine import machine_bytes

_MIB = 2**20
_MIN = 256 * _MIB  # enough for a phone's photograph in any format
_MAX, _FALLBACK = 2048 * _MIB, 1024 * _MIB
_LARGE = 1 / 16  # of the limit; the others, at most 8 at a time, take less than half of it together
_one_large = threading.RLock()  # held while a large picture is decoded, in any run of this process


def decoding_bytes(max_memory: int | None) -> int:
    """Return the limit: a quarter of the process's memory, else of the machine's but at most 2 GiB."""
    if max_memory is not None:
        return max(_MIN, max_memory // 4)
    total = machine_bytes()
    return max(_MIN, min(_MAX, total // 4)) if total else _FALLBACK


class PictureMemory(contextlib.ExitStack[None]):
    """The memory for one picture, which a thread decodes and resizes within this context.

    Large pictures are decoded one at a time, so that their number does not matter.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __enter__(self) -> PictureMemory:
        self.callback(CURRENT_MEMORY.reset, CURRENT_MEMORY.set(self))
        return self

    def fits(self, width: int, height: int, bytes_per_pixel: int) -> bool:
        """Return True if such a picture is within the limit."""
        return width * height * bytes_per_pixel <= self._limit

    def reserve(self, width: int, height: int, bytes_per_pixel: int) -> None:
        """Raise FrameError for a picture over the limit; wait until a large one may be decoded."""
        needed = width * height * bytes_per_pixel
        if needed > self._limit:
            raise FrameError(
                f"{width}x{height} pixels take {needed / _MIB:.0f} MiB to decode, and the limit is "
                f"{self._limit / _MIB:.0f} MiB; scale the image down, or allow more memory"
            )
        if needed > self._limit * _LARGE:
            self.enter_context(_one_large)


CURRENT_MEMORY: ContextVar[PictureMemory | None] = ContextVar("picture memory", default=None)
"""The memory for the picture that this thread decodes, or None without a limit."""
