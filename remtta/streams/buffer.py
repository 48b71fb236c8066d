"""The frames of a live source that wait for the model: the newest, or all."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from remtta.streams.watchdog import Watchdog

MAX_WAITING_BYTES = 256 * 1024**2
"""Memory for undecoded frames that wait for the model; 4K frames take 25 MB each."""

MAX_WAITING = 64
"""Maximum number of waiting frames if every frame counts."""

_POLL_S = 0.1


@dataclass(frozen=True)
class CapturedFrame:
    """A frame as received."""

    number: int
    arrived: float
    pixels: Any | None  # (H, W, 3) uint8, BGR; None if it could not be decoded
    read_at: str | None  # UTC; None in a finite video, so that its rows are reproducible
    position_s: float | None = None  # in a finite video


@dataclass
class Backlog:
    """Limits on waiting frames and the number of dropped ones, over all connections to a source."""

    newest_only: bool  # drop frames instead of waiting
    keep: int = 1  # number of newest frames kept, if older ones are dropped
    dropped: int = 0

    def most(self, shot: CapturedFrame) -> int:
        """Return how many frames of this size may wait."""
        size = 0 if shot.pixels is None else shot.pixels.nbytes
        return min(self.keep if self.drops(shot) else MAX_WAITING, max(1, MAX_WAITING_BYTES // max(1, size)))

    def drops(self, shot: CapturedFrame) -> bool:
        """Return True if older frames are dropped to make room for this one; a finite video is read whole."""
        return self.newest_only and shot.read_at is not None


class FrameBuffer:
    """Hands frames from the thread that reads a connection to the thread that consumes them.

    The watchdog pauses while there is no room; `closed` is set when no more frames of the source are wanted.
    """

    def __init__(self, backlog: Backlog, watchdog: Watchdog, closed: threading.Event) -> None:
        self._backlog, self._watchdog, self._closed = backlog, watchdog, closed
        self._change = threading.Condition()
        self._waiting: deque[CapturedFrame] = deque()
        self._over = self._left = False

    @property
    def is_wanted(self) -> bool:
        """True while there is a consumer."""
        return not (self._left or self._closed.is_set())

    def take(self, deadline: float = math.inf) -> CapturedFrame | None:
        """Return the next frame; None at the end, at the deadline, or if a read hangs."""
        with self._change:
            while not self._closed.is_set():
                if self._waiting:
                    self._change.notify_all()
                    return self._waiting.popleft()
                if self._over:
                    return None
                if self._watchdog.hangs() or self._watchdog.clock() >= deadline:
                    self._left = True
                    return None
                self._change.wait(_POLL_S)
        return None

    def put(self, shot: CapturedFrame) -> None:
        """Add a frame, as soon as there is room."""
        most = self._backlog.most(shot)
        with self._change:
            while self._backlog.drops(shot) and len(self._waiting) >= most:
                self._waiting.popleft()
                self._backlog.dropped += 1
            while len(self._waiting) >= most and self.is_wanted:
                self._watchdog.rest()
                self._change.wait(_POLL_S)
            self._watchdog.wake()
            self._waiting.append(shot)
            self._change.notify_all()

    def end(self) -> None:
        """Mark the end: no more frames will be added."""
        with self._change:
            self._over = True
            self._change.notify_all()

    def leave(self) -> None:
        """Mark that no more frames will be taken."""
        with self._change:
            self._left = True
            self._change.notify_all()
