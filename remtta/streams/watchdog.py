"""Detect a live source that hangs, or sends nothing that can be decoded."""

from __future__ import annotations

from collections.abc import Callable

_WHOLE = 0.9
"""A call that took this share of FFmpeg's timeout is considered timed out. A frame that it still returned is no sign of
life: the decoder was flushed.
"""
_HANGING = 1.1
"""A call that takes this multiple of the timeout hangs, and FFmpeg's own timeout failed."""


class Watchdog:
    """Times the calls of one connection; set by the reading thread, queried by the consuming thread as well.

    It times out after `read_timeout_s` without a decodable frame.

    Attributes:
        clock: Returns seconds from an arbitrary origin.
        opened: True once the source is open.
        reason: What timed out; None so far.
        stalled: True if a single call timed out.
    """

    def __init__(self, open_timeout_s: float, read_timeout_s: float, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.opened = self.stalled = False
        self.reason: str | None = None
        self._open_timeout_s, self._read_timeout_s = open_timeout_s, read_timeout_s
        self._begun = clock()
        self._bad_since: float | None = None  # None after a whole frame
        self._busy_since: float | None = self._begun  # None while the reading thread waits for room

    def open(self) -> float:
        """Record that the source is open; return the time."""
        self.opened = True
        return self.clock()

    def wake(self) -> float:
        """Record that a call begins; return the time."""
        self._busy_since = now = self.clock()
        return now

    def rest(self) -> None:
        """Record that no call is made until `wake`."""
        self._busy_since = None

    def hangs(self) -> bool:
        """Return True if a call hangs."""
        since = self._busy_since
        return since is not None and self._took(_HANGING, since)

    def timed_out(self, since: float | None = None) -> bool:
        """Return True if a call that began at `since`, by default the opening, used up FFmpeg's timeout."""
        return self._took(_WHOLE, self._begun if since is None else since)

    def starves(self, since: float) -> bool:
        """Return True if there has been no decodable frame since a time that is too long ago."""
        if self.clock() - since < self._read_timeout_s:
            return False
        self.reason = f"no frame that could be decoded within {self._read_timeout_s:g} s"
        return True

    def is_starved_after(self, whole: bool) -> bool:
        """Return `starves`, after a frame that could or could not be decoded."""
        if whole:
            self._bad_since = None
        elif self._bad_since is None:
            self._bad_since = self.clock()
        return self._bad_since is not None and self.starves(self._bad_since)

    def _took(self, part: float, since: float) -> bool:
        what, limit = ("frame", self._read_timeout_s) if self.opened else ("answer", self._open_timeout_s)
        if self.clock() - since < part * limit:
            return False
        self.reason, self.stalled = f"no {what} within {limit:g} s", True
        return True
