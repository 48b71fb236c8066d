"""Cameras and network streams: they never end, they only get lost and come back.

A thread per connection reads the frames, so that a read that hangs can be given up: the thread is then left behind,
and a new connection opened. Reading never waits for the model where only the newest frames count.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, Protocol

from PIL import Image

from remtta.errors import FrameError, RemttaError, StreamError, UsageError
from remtta.streams.addresses import why_not_open
from remtta.streams.frames import Frame, Gap
from remtta.streams.opencv import load_opencv
from remtta.streams.video import (
    OPEN_TIMEOUT_S,
    READ_TIMEOUT_S,
    cannot_open,
    no_frame_advice,
    open_capture,
    video_name,
    warn_if_cut,
)

Buffer = Literal["latest", "all"]

MOST_WAITING_BYTES = 256 * 1024**2
"""Undecoded frames that wait for the model; 4K frames take 25 MB each."""

MOST_WAITING = 64
"""The same as a number of frames, where every frame counts."""

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
_POLL_S = 0.1

_WHOLE = 0.9
"""A call that took such a part of FFmpeg's timeout took all of it. A frame that then comes all the same is no sign of
life: the decoder gave out what it still held."""
_HANGING = 1.1
"""A call that took so much of it hangs: FFmpeg's own timeout is no help there."""
_TRIES = 30
"""Reads in a row that may fail: OpenCV fails one for each part of a stream that its decoder refuses."""
_GOODBYE_S = 0.5

_log = logging.getLogger("remtta")


class Capture(Protocol):
    """What is used of `cv2.VideoCapture`."""

    def isOpened(self) -> bool: ...
    def grab(self) -> bool: ...
    def retrieve(self) -> tuple[bool, Any]: ...
    def get(self, prop: int, /) -> float: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class LiveOptions:
    """How a live source is read.

    Attributes:
        reconnect_for: Seconds to try to get a lost source back; 0 ends the stream at the first loss, which is an error
            where it is known not to be the source's own end.
        buffer: "latest" drops frames that the model is too slow for, oldest first; "all" has the source wait. A source
            that cannot wait then loses frames in its driver or on the network, or hangs up and is opened again.
        open_timeout_s: Seconds that a source may take to open.
        read_timeout_s: The same for a frame that can be decoded.
        wait_at_start: Wait for the source as long also before its first frame, in place of failing at once.
    """

    reconnect_for: float = 60.0
    buffer: Buffer = "latest"
    open_timeout_s: float = OPEN_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S
    wait_at_start: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reconnect_for < math.inf:
            raise UsageError(f"the seconds to reconnect for must be >= 0 and finite, got {self.reconnect_for}")
        if self.buffer not in ("latest", "all"):
            raise UsageError(f"buffer must be latest or all, got {self.buffer}")


class LiveSource:
    """Frames of a camera or network stream, over as many connections as it takes.

    Numbers count every frame that arrived, dropped ones too, and times are seconds since the first one arrived; both
    run on after a reconnect. An address behind which a finite video turns out to be is read whole, and once; its
    times are those in the video.

    Attributes:
        name: The source without a password.
        options: How it is read.
        state: "opening", "running" or "reconnecting".
        keep: How many of the newest frames to keep for the model, where older ones are dropped.
        dropped: Frames that were.
        finite: Whether it turned out to be a finite video; known with the first frame.

    Args:
        source: Camera index, device or URL.
        options: When to reconnect, and what to buffer.
        stride: Take every stride-th frame; the others are not converted.
        connect: Opens the source, by default with OpenCV.
        clock: Seconds, from any start.
        sleep: Waits so many seconds; by default until `close` at the longest.
        jitter: A random number in [0, 1), so that many readers of one server do not all come back at once.
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
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.name = video_name(source)
        self.options = options or LiveOptions()
        self.state: Literal["opening", "running", "reconnecting"] = "opening"
        self.keep = 1
        self.dropped = 0
        self.finite = False
        self._source, self._stride, self._connect = source, stride, connect
        self._clock, self._jitter = clock, jitter
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        self._connection: _Connection | None = None
        self._number = 0
        self._began: float | None = None
        self._lost_at: float | None = None
        self._size: tuple[int, int] | None = None

    @property
    def is_network(self) -> bool:
        """Whether it is a network stream, not a camera."""
        return isinstance(self._source, str) and "://" in self._source

    @property
    def newest_only(self) -> bool:
        """Whether frames are dropped rather than waited for."""
        return self.options.buffer == "latest"

    @property
    def seconds_lost(self) -> float:
        """For how long the source has been away; 0 while it is there, and before its first frame."""
        lost_at = self._lost_at
        return 0.0 if lost_at is None else self._clock() - lost_at

    def frames(self) -> Generator[Frame]:
        """The frames, once.

        Raises:
            StreamError: If OpenCV cannot be loaded, the source cannot be opened or yields no frame at all, or it was
                lost and did not come back in time, or was not to be waited for.
        """
        cv2 = load_opencv("video", StreamError)
        if self._connect is None:
            options = self.options
            self._connect = partial(open_capture, cv2, self._source, options.open_timeout_s, options.read_timeout_s)
        try:
            connection, gap = self._open(), None
            shot = connection.take()
            if shot is None and not self._closed.is_set():
                if not self._may_come(connection):
                    raise connection.failure(self._source)
                connection, shot, gap = self._reconnect(connection, None)
            while shot is not None:
                self.finite = connection.promised > 0
                self.state, self._lost_at = "running", None
                yield self._frame(cv2, shot, gap)
                last, gap, shot = shot, None, connection.take()
                if shot is None and not self._is_over(connection):
                    connection, shot, gap = self._reconnect(connection, last)
        finally:
            self._leave()

    def close(self) -> None:
        """Stop reading, from any thread; a read that hangs is left behind."""
        self._closed.set()
        connection = self._connection
        if connection:
            connection.leave(wait_s=_GOODBYE_S)

    def _open(self) -> _Connection:
        assert self._connect is not None
        self._leave()
        self._connection = _Connection(self, self._connect, self._number, self._closed, self._clock, self._stride)
        return self._connection

    def _leave(self) -> None:
        if self._connection:
            self._connection.leave()
            self._number = self._connection.number
            self._connection = None

    def _is_over(self, connection: _Connection) -> bool:
        """Whether the end of a connection is the end of the stream."""
        if self._closed.is_set():
            return True
        if connection.promised > 0:
            warn_if_cut(self.name, connection.number, connection.promised)
            return True
        if self.options.reconnect_for > 0:
            return False
        if connection.failed:
            raise StreamError(
                f"{self.name} was lost ({connection.reason}); check it and the network, or have it waited for with "
                "--reconnect-for"
            )
        _log.warning("%s is at its end (%s), and is not to be opened again", self.name, connection.reason)
        return True

    def _may_come(self, connection: _Connection) -> bool:
        """Whether to wait for a source whose first connection gave no frame."""
        options = self.options
        return options.wait_at_start and options.reconnect_for > 0 and not connection.hopeless

    def _reconnect(self, lost: _Connection, last: _Shot | None) -> tuple[_Connection, _Shot | None, Gap | None]:
        """A connection that gives frames (again), with its first one; none if closed meanwhile."""
        self.state = "reconnecting" if last else "opening"
        self._lost_at = self._clock() if last else None
        patience, connection = self.options.reconnect_for, lost
        what, back = ("lost", " back") if last else ("not there", "")
        _log.warning("%s is %s (%s); trying to get it%s for %g s", self.name, what, lost.reason, back, patience)
        deadline = self._clock() + patience
        delay, attempts = _FIRST_DELAY_S, 0
        while not self._closed.is_set():
            self._sleep(min(delay * (1 + self._jitter()) / 2, max(0.0, deadline - self._clock())))
            if self._clock() >= deadline:
                raise StreamError(
                    f"{self.name} was {what} ({lost.reason}) and did not come{back} within {patience:g} s; "
                    "check it and the network, or wait longer with --reconnect-for"
                )
            if self._closed.is_set():
                break
            delay, attempts = min(2 * delay, _LONGEST_DELAY_S), attempts + 1
            connection = self._open()
            if shot := self._first_whole(connection, deadline):
                if last is None:
                    _log.warning("%s is there now", self.name)
                    return connection, shot, None
                gap = Gap(round(shot.arrived - last.arrived, 3), lost.reason, attempts)
                _log.warning("%s is back after %.1f s", self.name, gap.seconds)
                return connection, shot, gap
            _log.debug("%s, attempt %d: %s", self.name, attempts, connection.reason)
        return connection, None, None

    def _first_whole(self, connection: _Connection, deadline: float) -> _Shot | None:
        """The first frame that can be decoded: before that, nothing is back."""
        shot = connection.take(deadline)
        while shot is not None and shot.pixels is None:
            shot = connection.take(deadline)
        return shot

    def _frame(self, cv2: Any, shot: _Shot, gap: Gap | None) -> Frame:
        if self._began is None:
            self._began = shot.arrived
        if shot.pixels is not None:
            height, width = shot.pixels.shape[:2]
            if self._size not in (None, (width, height)):
                _log.info("%s now gives frames of %d x %d pixels", self.name, width, height)
            self._size = width, height

        def load() -> Image.Image:
            if shot.pixels is None:
                raise FrameError("cannot be decoded")
            return Image.fromarray(cv2.cvtColor(shot.pixels, cv2.COLOR_BGR2RGB))

        time_s = shot.arrived - self._began if shot.position_s is None else shot.position_s
        return Frame(self.name, load, shot.number, round(max(time_s, 0.0), 6), gap, shot.read_at)


@dataclass(frozen=True)
class _Shot:
    """A frame as it arrived."""

    number: int
    arrived: float
    pixels: Any | None  # (H, W, 3) uint8, BGR; None if it could not be decoded
    read_at: str | None  # UTC; None in a finite video, of which every reading is to be the same
    position_s: float | None = None  # in a finite video


class _Connection:
    """One opening of a source, the thread that reads it, and the frames that wait to be taken."""

    def __init__(
        self,
        live: LiveSource,
        connect: Callable[[], Capture],
        number: int,
        closed: threading.Event,
        clock: Callable[[], float],
        stride: int,
    ) -> None:
        self.number = number  # of the next frame
        self.promised = 0  # frames in all, of a finite video
        self.reason = "the connection ended"
        self._live, self._connect, self._closed, self._clock, self._stride = live, connect, closed, clock, stride
        self._error: Exception | None = None
        self._why_not_open: str | None = None
        self._opened = self._over = self._left = self._stalled = self._undecodable = False
        self._change = threading.Condition()
        self._waiting: deque[_Shot] = deque()
        self._begun = clock()
        self._busy_since: float | None = self._begun  # None while the thread waits for room
        self._whole_at = self._begun  # when the last frame came that could be decoded
        self._thread = threading.Thread(target=self._run, name="remtta-live", daemon=True)
        self._thread.start()

    def take(self, deadline: float = math.inf) -> _Shot | None:
        """The next frame; None if there will be none, or none came by the deadline (`reason` says why)."""
        with self._change:
            while not self._closed.is_set():
                if self._waiting:
                    self._change.notify_all()
                    return self._waiting.popleft()
                if self._over:
                    return None
                if self._hangs() or self._clock() >= deadline:
                    self._left = True
                    return None
                self._change.wait(_POLL_S)
        return None

    def leave(self, wait_s: float = 0.0) -> None:
        """Have the thread end as soon as its call returns, and wait for that a little."""
        with self._change:
            self._left = True
            self._change.notify_all()
        self._thread.join(wait_s)

    @property
    def failed(self) -> bool:
        """Whether it ended in a way that no source ends by itself."""
        return self._error is not None or self._stalled or self._undecodable

    @property
    def hopeless(self) -> bool:
        """Whether it failed for a reason that waiting does not change."""
        return isinstance(self._error, RemttaError) or self.promised > 0

    def failure(self, source: str | int) -> StreamError:
        """What to raise if the very first connection gave no frame."""
        if isinstance(self._error, RemttaError):
            return StreamError(str(self._error))
        if self._error or self._left or self._stalled:
            return StreamError(f"{self._live.name}: {self.reason}; check the camera or the network")
        if not self._opened:
            return StreamError(cannot_open(source, self._why_not_open))
        return StreamError(f"{self._live.name}: no frame could be decoded; {no_frame_advice(self._live.name)}")

    def _hangs(self) -> bool:
        since = self._busy_since
        return since is not None and self._took(_HANGING, since)

    def _took(self, part: float, since: float) -> bool:
        """Whether a call that began then has taken such a part of its timeout, which is then the reason of the loss."""
        options = self._live.options
        what, limit = ("frame", options.read_timeout_s) if self._opened else ("answer", options.open_timeout_s)
        if self._clock() - since < part * limit:
            return False
        self.reason, self._stalled = f"no {what} within {limit:g} s", True
        return True

    def _run(self) -> None:
        try:
            self._read()
        except Exception as error:  # OpenCV's own, mostly
            self._error = error
            self.reason = " ".join(str(error).split()) or type(error).__name__
        with self._change:
            self._over = True
            self._change.notify_all()

    def _read(self) -> None:
        cv2 = load_opencv("video", StreamError)
        capture = self._connect()
        try:
            if not capture.isOpened():
                if not self._took(_WHOLE, self._begun):
                    self._why_not_open = why_not_open(str(self._live._source)) if self._live.is_network else None
                    self.reason = self._why_not_open or "it cannot be opened"
                return
            self.promised = int(max(0, capture.get(cv2.CAP_PROP_FRAME_COUNT)))
            self._opened, self._whole_at = True, self._clock()
            grabbed_at = self._whole_at
            refused, tries = 0, _TRIES if self._live.is_network and not self.promised else 1
            while (asked := self._go_on()) is not None:
                grabbed, arrived = capture.grab(), self._clock()
                stalled = not self.promised and self._took(_WHOLE, asked)
                if not grabbed:
                    refused += 1
                    if stalled or refused >= tries or self._is_undecodable_since(grabbed_at):
                        return
                    continue
                if stalled:
                    arrived = asked
                for _ in range(refused):  # parts that the decoder refused, as it turns out: the stream goes on
                    if self.number % self._stride == 0:
                        self._give(_Shot(self.number, arrived, None, self._utc(arrived)))
                    self.number += 1
                refused, grabbed_at = 0, arrived
                if self.number % self._stride == 0:
                    decoded, pixels = capture.retrieve()
                    whole = decoded and pixels is not None and pixels.size > 0
                    position_s = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000 if self.promised else None
                    shown = pixels if whole else None
                    self._give(_Shot(self.number, arrived, shown, self._utc(arrived), position_s))
                    if self._is_undecodable(whole):
                        return
                self.number += 1
                if stalled:
                    return
        finally:
            capture.release()  # before the end is told: a camera can be opened only once

    def _utc(self, moment: float) -> str | None:
        """A moment of the clock as a date, for live sources."""
        if self.promised:
            return None
        return (datetime.now(UTC) - timedelta(seconds=self._clock() - moment)).isoformat(timespec="milliseconds")

    def _is_undecodable(self, whole: bool) -> bool:
        """Whether a live source has sent nothing but undecodable frames for too long."""
        if whole or self.promised:
            self._whole_at = self._clock()
        return self._is_undecodable_since(self._whole_at)

    def _is_undecodable_since(self, whole_at: float) -> bool:
        limit = self._live.options.read_timeout_s
        if self._clock() - whole_at < limit:
            return False
        self.reason, self._undecodable = f"no frame that could be decoded within {limit:g} s", True
        return True

    def _go_on(self) -> float | None:
        """The time, or None if there is nothing to go on for."""
        self._busy_since = self._clock()
        return None if self._left or self._closed.is_set() else self._busy_since

    def _give(self, shot: _Shot) -> None:
        size = 0 if shot.pixels is None else shot.pixels.nbytes
        drops = self._live.newest_only and self.promised == 0
        most = min(self._live.keep if drops else MOST_WAITING, max(1, MOST_WAITING_BYTES // max(1, size)))
        with self._change:
            while drops and len(self._waiting) >= most:
                self._waiting.popleft()
                self._live.dropped += 1
            while len(self._waiting) >= most and not (self._left or self._closed.is_set()):
                self._busy_since = None
                self._change.wait(_POLL_S)
            self._busy_since = self._clock()
            self._waiting.append(shot)
            self._change.notify_all()
