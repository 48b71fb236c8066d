"""The frames of a live source that wait for the model: the newest ones, or all of them."""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from remtta.streams.watchdog import Watchdog

MOST_WAITING_BYTES = 256 * 1024**2
"""Undecoded frames that wait for the model; 4K frames take 25 MB each."""

MOST_WAITING = 64
"""The same as a number of frames, where every frame counts."""

_POLL_S = 0.1


@dataclass(frozen=True)
class Shot:
    """A frame as it arrived."""

    number: int
    arrived: float
    pixels: Any | None  # (H, W, 3) uint8, BGR; None if it could not be decoded
    read_at: str | None  # UTC; None in a finite video, of which every reading is to be the same
    position_s: float | None = None  # in a finite video

    @property
    def is_live(self) -> bool:
        """True if it cannot be read again."""
        return self.read_at is not None


@dataclass
class Backlog:
    """What may wait, and what was lost by that, over all connections to a source."""

    newest_only: bool  # frames are dropped rather than waited for
    keep: int = 1  # of the newest ones, where older ones are dropped
    dropped: int = 0

    def most(self, shot: Shot) -> int:
        """Return how many shots like this one may wait."""
        size = 0 if shot.pixels is None else shot.pixels.nbytes
        return min(self.keep if self.drops(shot) else MOST_WAITING, max(1, MOST_WAITING_BYTES // max(1, size)))

    def drops(self, shot: Shot) -> bool:
        """Return True if older ones make room for this one."""
        return self.newest_only and shot.is_live


class ShotBuffer:
    """From the thread that reads one connection to the one that takes its frames.

    The watchdog rests while there is no room; `closed` is set once no frame of the source is wanted any more.
    """

    def __init__(self, backlog: Backlog, watchdog: Watchdog, closed: threading.Event) -> None:
        self._backlog, self._watchdog, self._closed = backlog, watchdog, closed
        self._change = threading.Condition()
        self._waiting: deque[Shot] = deque()
        self._over = self._left = False

    @property
    def is_wanted(self) -> bool:
        """True while somebody takes what is put in."""
        return not (self._left or self._closed.is_set())

    def take(self, deadline: float = math.inf) -> Shot | None:
        """The next shot; None if there will be none, or none came by the deadline or before a call hung."""
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

    def put(self, shot: Shot) -> None:
        """Add a shot, as soon as there is room for it."""
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
        """Nothing more is put in."""
        with self._change:
            self._over = True
            self._change.notify_all()

    def leave(self) -> None:
        """Nothing more is taken out."""
        with self._change:
            self._left = True
            self._change.notify_all()
