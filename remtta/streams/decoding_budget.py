"""A memory budget shared by all images being decoded: a file of kilobytes may decode to gigabytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from remtta.errors import FrameError
from remtta.machine import machine_bytes

_MIB = 2**20
_MIN = 256 * _MIB  # enough for a phone's photograph in any format
_MAX, _FALLBACK = 2048 * _MIB, 1024 * _MIB


def decoding_bytes(max_memory: int | None) -> int:
    """Return the decoding memory: a quarter of the process's limit, else of the machine's memory but at most 2 GiB."""
    if max_memory is not None:
        return max(_MIN, max_memory // 4)
    total = machine_bytes()
    return max(_MIN, min(_MAX, total // 4)) if total else _FALLBACK


class Budget:
    """Memory for all images being decoded, whatever the number of threads.

    Requests are served in order: a large one waits until there is room, and later ones wait behind it. Open a share per
    frame with `share`; image decoders reserve memory in the share of their thread. `afterwards` returns the additional
    bytes for a decoded image of a width and height.
    """

    def __init__(
        self, num_bytes: int | None = None, afterwards: Callable[[int, int], int] = lambda width, height: 0
    ) -> None:
        self.num_bytes = decoding_bytes(None) if num_bytes is None else num_bytes
        self.afterwards = afterwards
        self._free = self.num_bytes
        self._turn = threading.Lock()
        self._change = threading.Condition()

    @contextlib.contextmanager
    def share(self) -> Iterator[None]:
        """Reserve memory for images decoded by this thread in the block; release it at the end."""
        share = Share(self)
        token = CURRENT_SHARE.set(share)
        try:
            yield
        finally:
            CURRENT_SHARE.reset(token)
            self.give_back(share.taken)

    def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` are free, and take them."""
        with self._turn, self._change:
            self._change.wait_for(lambda: self._free >= num_bytes)
            self._free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return memory to the budget."""
        with self._change:
            self._free += num_bytes
            self._change.notify()


class Share:
    """One frame's share of a budget. It reserves only once, since holding some and waiting for more could deadlock."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.taken = budget, 0

    def fits(self, width: int, height: int, bytes_per_pixel: int) -> bool:
        """Return True if the budget is large enough for such an image."""
        return self._needed(width, height, bytes_per_pixel) <= self._budget.num_bytes

    def _needed(self, width: int, height: int, bytes_per_pixel: int) -> int:
        return width * height * bytes_per_pixel + self._budget.afterwards(width, height)

    def reserve(self, width: int, height: int, bytes_per_pixel: int) -> None:
        """Wait for room for such an image; raise FrameError if the budget is too small for it."""
        needed = self._needed(width, height, bytes_per_pixel)
        if needed > self._budget.num_bytes:
            raise FrameError(
                f"{width}x{height} pixels take {needed / _MIB:.0f} MiB to decode, and the limit is "
                f"{self._budget.num_bytes / _MIB:.0f} MiB; scale the image down, or allow more memory"
            )
        self._budget.take(needed)
        self.taken += needed


CURRENT_SHARE: ContextVar[Share | None] = ContextVar("share", default=None)
"""The share of the frame that this thread decodes, or None without a budget."""
