"""Tell when what reads a live source hangs, or gets nothing that can be decoded."""

from __future__ import annotations

from collections.abc import Callable

_WHOLE = 0.9
"""A call that took such a part of FFmpeg's timeout took all of it. A frame that then comes all the same is no sign of
life: the decoder gave out what it still held."""
_HANGING = 1.1
"""A call that took so much of it hangs: FFmpeg's own timeout is no help there."""


class Watchdog:
    """Times the calls of one connection. The thread that reads sets it, the one that takes frames asks it, too.

    Attributes:
        clock: Seconds, from any start.
        opened: True once the source has opened.
        reason: What took too long; None so far.
        stalled: True if that was a single call.

    Args:
        open_timeout_s: Seconds that a source may take to open.
        read_timeout_s: The same for a frame that can be decoded.
        clock: Seconds, from any start.
    """

    def __init__(self, open_timeout_s: float, read_timeout_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.opened = self.stalled = False
        self.reason: str | None = None
        self._open_timeout_s, self._read_timeout_s = open_timeout_s, read_timeout_s
        self._begun = self._whole_at = clock()
        self._busy_since: float | None = self._begun  # None while the reading thread waits for room

    def open(self) -> float:
        """Note that the source has opened; return the time."""
        self.opened, self._whole_at = True, self.clock()
        return self._whole_at

    def wake(self) -> float:
        """Note that a call begins; return the time."""
        self._busy_since = now = self.clock()
        return now

    def rest(self) -> None:
        """Note that no call is made until `wake`."""
        self._busy_since = None

    def hangs(self) -> bool:
        """Return True if a call does not return."""
        since = self._busy_since
        return since is not None and self._took(_HANGING, since)

    def timed_out(self, since: float | None = None) -> bool:
        """Return True if a call that began then, by default the opening, took FFmpeg's whole timeout."""
        return self._took(_WHOLE, self._begun if since is None else since)

    def starves(self, whole_at: float) -> bool:
        """Return True if the last frame that could be decoded is from too long ago."""
        if self.clock() - whole_at < self._read_timeout_s:
            return False
        self.reason = f"no frame that could be decoded within {self._read_timeout_s:g} s"
        return True

    def is_starved_after(self, whole: bool) -> bool:
        """Return the same after a frame that could be decoded, or could not."""
        if whole:
            self._whole_at = self.clock()
        return self.starves(self._whole_at)

    def _took(self, part: float, since: float) -> bool:
        what, limit = ("frame", self._read_timeout_s) if self.opened else ("answer", self._open_timeout_s)
        if self.clock() - since < part * limit:
            return False
        self.reason, self.stalled = f"no {what} within {limit:g} s", True
        return True
