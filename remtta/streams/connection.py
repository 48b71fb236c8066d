"""A connection to a live source: the thread that reads it, its timeouts, and the frames that wait for the model."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from remtta.errors import RemttaError, StreamError, without_password
from remtta.options import LiveOptions
from remtta.streams.capture import Capture, cannot_open, no_frame
from remtta.streams.frames import CannotOpen, Picture

MAX_WAITING_BYTES = 256 * 1024**2
"""Memory for frames that wait for the model; 4K frames take up to 25 MB each."""

MAX_WAITING = 64
"""Maximum number of waiting frames if every frame counts."""

_POLL_S = 0.1
_HANGING = 1.1
"""A call that takes this multiple of the timeout hangs, and FFmpeg's own timeout failed."""


def source_name(source: str | int) -> str:
    """Return a camera's number, or a path or URL without its password, for messages."""
    return f"camera {source}" if isinstance(source, int) else without_password(source)


@dataclass(frozen=True)
class CapturedFrame:
    """A frame as received."""

    number: int
    arrived: float  # by the source's clock
    picture: Picture
    read_at: str | None  # UTC; None in a finite video, so that its rows are reproducible


@dataclass
class Backlog:
    """Limits on waiting frames and the number of dropped ones, over all connections to a source."""

    newest_only: bool  # drop frames instead of waiting, unless it is a finite video
    keep: int = 1  # number of newest frames kept, if older ones are dropped
    dropped: int = 0


class Connection:
    """A connection to a camera or URL, read by a thread, which is left running if a read hangs. Only every stride-th
    frame is kept; `closed` is set when no more are wanted.
    """

    def __init__(
        self,
        source: str | int,
        connect: Callable[[], Capture],
        options: LiveOptions,
        backlog: Backlog,
        closed: threading.Event,
        clock: Callable[[], float],
        *,
        stride: int,
        number: int,
    ) -> None:
        self.number = number  # of the next frame
        self.promised = 0  # number of frames according to a finite video's header
        self._source, self._connect, self._stride = source, connect, stride
        self._options, self._backlog, self._closed, self._clock = options, backlog, closed, clock
        self._change = threading.Condition()
        self._waiting: deque[CapturedFrame] = deque()
        self._ended = self._abandoned = self._opened = False
        self._call_began: float | None = clock()  # None while the reading thread waits for room
        self._error: Exception | None = None
        self._codec = ""
        self._thread = threading.Thread(target=self._run, name="remtta-live", daemon=True)
        self._thread.start()

    def take(self, deadline: float = math.inf) -> CapturedFrame | None:
        """Return the next frame; None at the end, at the deadline, or if a read hangs."""
        with self._change:
            while not self._closed.is_set():
                if self._waiting:
                    self._change.notify_all()
                    return self._waiting.popleft()
                if self._ended:
                    return None
                began, now = self._call_began, self._clock()
                hangs = began is not None and now - began >= _HANGING * self._limit_s
                if hangs:
                    self._error = TimeoutError(f"no {'frame' if self._opened else 'answer'} within {self._limit_s:g} s")
                if hangs or now >= deadline:
                    self._abandoned = True
                    return None
                self._change.wait(_POLL_S)
        return None

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end once its current call returns, and wait for that up to `wait_s` seconds."""
        with self._change:
            self._abandoned = True
            self._change.notify_all()
        self._thread.join(wait_s)

    @property
    def reason(self) -> str:
        """Why there are no more frames."""
        if self._error is None:
            return "the connection ended"
        reason = getattr(self._error, "strerror", None) or str(self._error)
        return " ".join(reason.split()) or type(self._error).__name__

    @property
    def failed(self) -> bool:
        """True if it ended abnormally."""
        return self._error is not None

    @property
    def hopeless(self) -> bool:
        """True if it failed for a reason that waiting cannot change."""
        return isinstance(self._error, RemttaError) or self.promised > 0

    def failure(self) -> StreamError:
        """Return the error to raise if the first connection gave no frame."""
        name = source_name(self._source)
        if isinstance(self._error, RemttaError):
            return StreamError(str(self._error))
        if isinstance(self._error, CannotOpen):
            return StreamError(cannot_open(self._source, self.reason))
        if self._error:
            return StreamError(f"{name}: {self.reason}; check the camera or the network")
        return no_frame(name, self._codec)

    def _run(self) -> None:
        try:
            capture = self._connect()
            try:
                self._codec, self.promised, self._opened = capture.codec, capture.num_frames, True
                self._read(capture)
            finally:
                capture.close()  # before the end is announced: a camera can be opened only once
        except Exception as error:  # of OpenCV, FFmpeg or the network
            self._error = self._error or error
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _read(self, capture: Capture) -> None:
        limit_s = self._options.read_timeout_s
        stalled_at: float | None = None  # what the decoder still gives after a timeout arrived before it
        undecodable_since: float | None = None
        while self._is_wanted:
            self._call_began = began = self._clock()
            picture = capture.read()
            if picture is None:
                return
            now = self._clock()
            if not self.promised and now - began >= limit_s:
                stalled_at = began
            if self.number % self._stride == 0:
                self._put(now if stalled_at is None else stalled_at, picture)
            self.number += 1
            if picture.size:
                undecodable_since = None
            elif undecodable_since is None:
                undecodable_since = began
            elif not self.promised and now - undecodable_since >= limit_s:
                raise TimeoutError(f"no frame that could be decoded within {limit_s:g} s")

    @property
    def _is_wanted(self) -> bool:
        return not (self._abandoned or self._closed.is_set())

    @property
    def _limit_s(self) -> float:
        return self._options.read_timeout_s if self._opened else self._options.open_timeout_s

    def _put(self, arrived: float, picture: Picture) -> None:
        """Hand a frame to the consumer, as soon as there is room."""
        then = datetime.now(UTC) - timedelta(seconds=self._clock() - arrived)
        read_at = None if self.promised else then.isoformat(timespec="milliseconds")
        frame = CapturedFrame(self.number, arrived, picture, read_at)
        drops = self._backlog.newest_only and not self.promised
        most = max(1, self._backlog.keep) if drops else MAX_WAITING
        width, height = picture.size or (1, 1)
        capacity = min(most, max(1, MAX_WAITING_BYTES // (3 * width * height)))
        with self._change:
            while drops and len(self._waiting) >= capacity:
                self._waiting.popleft()
                self._backlog.dropped += 1
            while len(self._waiting) >= capacity and self._is_wanted:
                self._call_began = None
                self._change.wait(_POLL_S)
            self._call_began = self._clock()
            self._waiting.append(frame)
            self._change.notify_all()
