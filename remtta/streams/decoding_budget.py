"""One budget of memory for all images that are decoded at a time: a file of kilobytes may hold one of gigabytes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

from remtta.errors import FrameError

_MIB = 2**20
_PART = 4  # of what there is
_LEAST = 256 * _MIB  # for a photograph as phones take them, in any format
_MOST, _FALLBACK = 2048 * _MIB, 1024 * _MIB

_CGROUPS = Path("/sys/fs/cgroup")


def decoding_bytes(max_memory: int | None) -> int:
    """Return a quarter of the limit on the process, else of the machine's memory, of which 2 GiB are enough."""
    if max_memory is not None:
        return max(_LEAST, max_memory // _PART)
    there = machine_bytes()
    return max(_LEAST, min(_MOST, there // _PART)) if there else _FALLBACK


def machine_bytes() -> int:
    """Return the memory of the machine, or of its container where that has less; 0 where the system does not tell."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # Windows has no sysconf
        return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits()])
    return 0


def _limits() -> Iterator[int]:
    """What control groups, of either version, allow this process."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            root, file = (_CGROUPS / controllers, "memory.limit_in_bytes") if controllers else (_CGROUPS, "memory.max")
            place = root / name.lstrip("/")
            for folder in (place, *place.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                        yield int((folder / file).read_text())


class Budget:
    """Memory for the images that are decoded at a time, whatever the number of threads.

    They get it in the order in which they ask. A large one waits until there is room, and keeps others waiting.
    What decodes frames in threads opens a share per frame; what decodes an image reserves in the share of its thread.

    Args:
        num_bytes: All of it; by default what `decoding_bytes` finds.
        afterwards: Bytes that are needed beside a decoded image of some width and height.
    """

    def __init__(
        self, num_bytes: int | None = None, afterwards: Callable[[int, int], int] = lambda width, height: 0
    ) -> None:
        self.num_bytes = decoding_bytes(None) if num_bytes is None else num_bytes
        self._afterwards = afterwards
        self._free = self.num_bytes
        self._waiting: deque[object] = deque()
        self._change = threading.Condition()

    @contextlib.contextmanager
    def share(self) -> Iterator[None]:
        """Hold what this thread decodes in the block to the budget; all of it is given back at the end."""
        share = Share(self)
        token = _share.set(share)
        try:
            yield
        finally:
            _share.reset(token)
            self.give_back(share.taken)

    def needed(self, width: int, height: int, bytes_per_pixel: int) -> int:
        """Return the bytes that an image takes until it is no longer needed."""
        return width * height * bytes_per_pixel + self._afterwards(width, height)

    def take(self, num_bytes: int) -> None:
        """Wait for so many bytes, which are at most all there are."""
        turn = object()
        with self._change:
            self._waiting.append(turn)
            while self._waiting[0] is not turn or self._free < num_bytes:
                self._change.wait()
            self._waiting.popleft()
            self._free -= num_bytes
            self._change.notify_all()

    def give_back(self, num_bytes: int) -> None:
        """Make room for what waits."""
        with self._change:
            self._free += num_bytes
            self._change.notify_all()


class Share:
    """One frame's part of a budget, which it asks for once: two that hold some and wait for more would wait forever."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.taken = budget, 0

    def fits(self, width: int, height: int, bytes_per_pixel: int) -> bool:
        """Return True if such an image can be decoded at all."""
        return self._budget.needed(width, height, bytes_per_pixel) <= self._budget.num_bytes

    def reserve(self, width: int, height: int, bytes_per_pixel: int) -> None:
        """Wait until there is room for such an image; raise FrameError if there never will be."""
        needed = self._budget.needed(width, height, bytes_per_pixel)
        if needed > self._budget.num_bytes:
            raise FrameError(
                f"{width}x{height} pixels take {needed / _MIB:.0f} MiB to decode, and the limit is "
                f"{self._budget.num_bytes / _MIB:.0f} MiB; scale the image down, or allow more memory"
            )
        self._budget.take(needed)
        self.taken += needed


_share: ContextVar[Share | None] = ContextVar("share", default=None)


def current_share() -> Share | None:
    """Return the share of the frame that this thread decodes; None where nothing is held to a budget."""
    return _share.get()
