"""Cameras and network streams, with reconnection."""

from __future__ import annotations

import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from typing import Literal

from remtta.errors import StreamError
from remtta.options import LiveOptions
from remtta.streams.capture import Capture, open_capture
from remtta.streams.connection import Backlog, CapturedFrame, Connection, source_name
from remtta.streams.frames import Frame, Gap
from remtta.streams.video import video_frame, warn_if_cut
from remtta.streams.web import polling_interval

_MIN_DELAY_S = 0.5
_MAX_DELAY_S = 30.0
_CLOSE_TIMEOUT_S = 0.5

_log = logging.getLogger(__name__)


class LiveSource:
    """Frames of a camera or network stream, over as many connections as needed.

    Numbers count every frame received, including dropped ones, and times are seconds since the first; both continue
    after a reconnect. An image at an address is requested every few seconds. If the address turns out to be a finite
    video, it is read completely, once, with the times in the video. `jitter` returns a random number in [0, 1), so that
    many readers of one server do not reconnect at once.
    """

    def __init__(
        self,
        source: str | int,
        options: LiveOptions | None = None,
        *,
        stride: int = 1,
        connect: Callable[[], Capture] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self.options = options or LiveOptions()
        self.state: Literal["opening", "running", "reconnecting"] = "opening"
        self.finite = False  # whether it is a finite video; known from the first frame on
        timeouts = self.options.open_timeout_s, self.options.read_timeout_s
        self._closed = threading.Event()
        self._source, self._stride = source, stride
        # A polled image may stay the same for any time.
        polled = polling_interval(source, self.options.poll) is not None
        self._connection_options = replace(self.options, read_timeout_s=math.inf) if polled else self.options
        self._connect = connect or partial(open_capture, source, *timeouts, self.options.poll, self._closed)
        self.backlog = Backlog(newest_only=self.options.buffer == "latest")
        self._clock, self._sleep, self._jitter = clock, sleep or self._closed.wait, jitter or random.Random().random
        self._connection: Connection | None = None
        self._number = 0
        self._lost_at: float | None = None
        self._began = 0.0  # when the first frame arrived

    @property
    def name(self) -> str:
        """The source without a password."""
        return source_name(self._source)

    @property
    def seconds_lost(self) -> float:
        """Seconds since the source was lost; 0 while it is available, and before its first frame."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else self._clock() - lost_at

    def age(self, time_s: float) -> float:
        """Return how many seconds ago the frame of this time arrived, whatever happened to the system's time since."""
        return max(0.0, self._clock() - self._began - time_s)

    def frames(self) -> Generator[Frame]:
        """Yield the frames, once; raise StreamError if the source cannot be opened or yields no frame, or it was
        lost and did not come back in time, or reconnection is off.
        """
        try:
            connection, gap = self._open(), None
            frame, last = connection.take(), None
            if frame is None and not self._closed.is_set():
                waits = self.options.wait_at_start and self.options.reconnect_for > 0
                if not waits or connection.hopeless:
                    raise connection.failure()
                connection, frame, gap = self._reconnect(connection, None)
            self._began = frame.arrived if frame else 0.0
            while frame is not None:
                self.finite = connection.promised > 0
                self.state, self._lost_at = "running", None
                if not (last and frame.picture.file and frame.picture.file == last.picture.file):  # as before the loss
                    time_s = frame.picture.time_s if self.finite else frame.arrived - self._began
                    yield video_frame(self.name, frame.picture, frame.number, time_s, gap, frame.read_at)
                    gap = None
                last, frame = frame, connection.take()
                if frame is None and not self._is_over(connection):
                    connection, frame, gap = self._reconnect(connection, last)
        finally:
            self._closed.set()
            self._disconnect()

    def close(self) -> None:
        """Stop reading, from any thread; a hanging read is abandoned."""
        self._closed.set()
        if connection := self._connection:
            connection.close(wait_s=_CLOSE_TIMEOUT_S)

    def _open(self) -> Connection:
        self._disconnect()
        self._connection = Connection(
            self._source,
            self._connect,
            self._connection_options,
            self.backlog,
            self._closed,
            self._clock,
            stride=self._stride,
            number=self._number,
        )
        return self._connection

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
            self._number = self._connection.number
            self._connection = None

    def _is_over(self, connection: Connection) -> bool:
        """Return True if the end of a connection is the end of the stream."""
        if self._closed.is_set():
            return True
        if connection.promised > 0 and connection.failed:
            of = f" of {connection.promised}" if connection.promised > connection.number else ""
            read = f"{connection.number}{of} frames"
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
        max_s, connection = self.options.reconnect_for, lost
        problem = "lost" if last else "not available"
        _log.warning("%s is %s (%s); retrying for %g s", self.name, problem, lost.reason, max_s)
        deadline = self._clock() + max_s
        delay_s = _MIN_DELAY_S
        for attempt in itertools.count(1):
            self._sleep(min(delay_s * (1 + self._jitter()) / 2, max(0.0, deadline - self._clock())))
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            if self._clock() >= deadline:
                break
            if self._closed.is_set():
                return connection, None, None
            connection = self._open()
            frame = connection.take(deadline)
            while frame is not None and frame.picture.size is None:  # cannot be decoded
                frame = connection.take(deadline)
            if frame:
                if last and connection.promised > 0:  # HLS: all of it was read live
                    _log.warning("%s has ended", self.name)
                    connection.close(wait_s=_CLOSE_TIMEOUT_S)
                    return connection, None, None
                if last is None:
                    _log.warning("%s is available now", self.name)
                    return connection, frame, None
                gap = Gap(round(frame.arrived - last.arrived, 3), lost.reason, attempt)
                _log.warning("%s is back after %.1f s", self.name, gap.seconds)
                before, now = last.picture.size, frame.picture.size
                if before and now and before != now:
                    _log.info("%s now gives frames of %d x %d pixels", self.name, *now)
                return connection, frame, gap
            _log.debug("%s, attempt %d: %s", self.name, attempt, connection.reason)
        raise StreamError(
            f"{self.name} was {problem} ({lost.reason}) and could not be opened within {max_s:g} s; "
            "check it and the network, or wait longer with --reconnect-for"
        )
