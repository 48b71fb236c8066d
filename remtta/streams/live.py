"""Cameras and network streams, with reconnection."""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any, Literal

from remtta.errors import StreamError
from remtta.options import LiveOptions
from remtta.streams.buffer import Backlog, CapturedFrame, FrameBuffer
from remtta.streams.connection import Connection, SourceSpec
from remtta.streams.frames import Frame, Gap
from remtta.streams.opencv import load_opencv
from remtta.streams.video import open_capture, video_frame, warn_if_cut
from remtta.streams.watchdog import Watchdog

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_GOODBYE_S = 0.5

_log = logging.getLogger("remtta")


class LiveSource:
    """Frames of a camera or network stream, over as many connections as needed.

    Numbers count every frame received, including dropped ones, and times are seconds since the first; both continue
    after a reconnect. If the address turns out to be a finite video, it is read completely, once, with the times in the
    video.

    Attributes:
        options: Timeouts, buffering and reconnection.
        state: "opening", "running" or "reconnecting".
        finite: True if it is a finite video; known from the first frame on.
        backlog: Frames received for the model, of which older ones may be dropped.

    Args:
        source: Camera index, device or URL.
        stride: Use every stride-th frame; the others are not converted.
        connect: Opens the source, by default with OpenCV.
        sleep: Waits for a number of seconds; by default at most until `close`.
        jitter: Returns a random number in [0, 1), so that many readers of one server do not reconnect at once.
    """

    def __init__(
        self,
        source: str | int,
        options: LiveOptions | None = None,
        *,
        stride: int = 1,
        connect: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.options = options or LiveOptions()
        self.state: Literal["opening", "running", "reconnecting"] = "opening"
        self.finite = False
        timeouts = self.options.open_timeout_s, self.options.read_timeout_s
        self._feed = SourceSpec(source, connect or partial(open_capture, source, *timeouts), stride)
        self.backlog = Backlog(newest_only=self.options.buffer == "latest")
        self._closed = threading.Event()
        self._clock, self._sleep, self._jitter = clock, sleep or self._closed.wait, jitter
        self._connection: Connection | None = None
        self._number = 0
        self._lost_at: float | None = None

    @property
    def name(self) -> str:
        """The source without a password."""
        return self._feed.name

    @property
    def seconds_lost(self) -> float:
        """Seconds since the source was lost; 0 while it is available, and before its first frame."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else self._clock() - lost_at

    def frames(self) -> Generator[Frame]:
        """Yield the frames, once; raise StreamError if OpenCV cannot be loaded, the source cannot be opened or yields
        no frame, or it was lost and did not come back in time, or reconnection is off.
        """
        cv2 = load_opencv("video", StreamError)
        began: float | None = None
        known: tuple[int, ...] | None = None
        with contextlib.closing(self._shots()) as shots:
            for shot, gap in shots:
                began = shot.arrived if began is None else began
                if shot.pixels is not None:
                    size = shot.pixels.shape[1::-1]
                    if known not in (None, size):
                        _log.info("%s now gives frames of %d x %d pixels", self.name, *size)
                    known = size
                time_s = shot.arrived - began if shot.position_s is None else shot.position_s
                yield video_frame(cv2, self.name, shot.pixels, shot.number, time_s, gap, shot.read_at)

    def close(self) -> None:
        """Stop reading, from any thread; a hanging read is abandoned."""
        self._closed.set()
        if connection := self._connection:
            connection.leave(wait_s=_GOODBYE_S)

    def _shots(self) -> Generator[tuple[CapturedFrame, Gap | None]]:
        """Yield the frames as they arrive, with the gap that each ended, if any."""
        try:
            connection, gap = self._open(), None
            shot = connection.shots.take()
            if shot is None and not self._closed.is_set():
                wanted = self.options.wait_at_start and self.options.reconnect_for > 0
                if not wanted or connection.hopeless:
                    raise connection.failure()
                connection, shot, gap = self._reconnect(connection, None)
            while shot is not None:
                self.finite = connection.promised > 0
                self.state, self._lost_at = "running", None
                yield shot, gap
                last, gap, shot = shot, None, connection.shots.take()
                if shot is None and not self._is_over(connection):
                    connection, shot, gap = self._reconnect(connection, last)
        finally:
            self._leave()

    def _open(self) -> Connection:
        self._leave()
        watchdog = Watchdog(self.options.open_timeout_s, self.options.read_timeout_s, self._clock)
        shots = FrameBuffer(self.backlog, watchdog, self._closed)
        self._connection = Connection(self._feed, watchdog, shots, self._number)
        return self._connection

    def _leave(self) -> None:
        if self._connection:
            self._connection.leave()
            self._number = self._connection.number
            self._connection = None

    def _is_over(self, connection: Connection) -> bool:
        """Return True if the end of a connection is the end of the stream."""
        if self._closed.is_set():
            return True
        if connection.promised > 0 and connection.failed:
            read = f"{connection.number} of {connection.promised} frames"
            raise StreamError(f"{self.name} was lost after {read} ({connection.reason}); check it and the network")
        if connection.promised > 0:
            warn_if_cut(self.name, connection.number, connection.promised)
            return True
        if self.options.reconnect_for > 0:
            return False
        if connection.failed:
            raise StreamError(
                f"{self.name} was lost ({connection.reason}); check it and the network, or wait for it with "
                "--reconnect-for"
            )
        _log.warning("%s has ended (%s) and is not reopened", self.name, connection.reason)
        return True

    def _reconnect(
        self, lost: Connection, last: CapturedFrame | None
    ) -> tuple[Connection, CapturedFrame | None, Gap | None]:
        """Return a new connection with its first frame, or None for the frame if closed meanwhile."""
        self.state = "reconnecting" if last else "opening"
        self._lost_at = self._clock() if last else None
        patience_s, connection = self.options.reconnect_for, lost
        what = "lost" if last else "not available"
        _log.warning("%s is %s (%s); retrying for %g s", self.name, what, lost.reason, patience_s)
        deadline = self._clock() + patience_s
        for attempt in self._attempts(deadline):
            if self._closed.is_set():
                return connection, None, None
            connection = self._open()
            if shot := _first_whole(connection, deadline):
                if last and connection.promised > 0:  # HLS: all of it was read live
                    _log.warning("%s has ended", self.name)
                    connection.leave(wait_s=_GOODBYE_S)
                    return connection, None, None
                if last is None:
                    _log.warning("%s is available now", self.name)
                    return connection, shot, None
                gap = Gap(round(shot.arrived - last.arrived, 3), lost.reason, attempt)
                _log.warning("%s is back after %.1f s", self.name, gap.seconds)
                return connection, shot, gap
            _log.debug("%s, attempt %d: %s", self.name, attempt, connection.reason)
        raise StreamError(
            f"{self.name} was {what} ({lost.reason}) and could not be opened within {patience_s:g} s; "
            "check it and the network, or wait longer with --reconnect-for"
        )

    def _attempts(self, deadline: float) -> Iterator[int]:
        """Count attempts until the deadline, with growing delays."""
        delay = _FIRST_DELAY_S
        for attempt in itertools.count(1):
            self._sleep(min(delay * (1 + self._jitter()) / 2, max(0.0, deadline - self._clock())))
            if self._clock() >= deadline:
                return
            yield attempt
            delay = min(2 * delay, _LONGEST_DELAY_S)


def _first_whole(connection: Connection, deadline: float) -> CapturedFrame | None:
    """Return the first decodable frame."""
    shot = connection.shots.take(deadline)
    while shot is not None and shot.pixels is None:
        shot = connection.shots.take(deadline)
    return shot
