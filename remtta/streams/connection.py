"""A connection to a live source: the thread that reads it, its timeouts, and the frames that wait for the model."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from remtta.errors import RemttaError, StreamError, without_password
from remtta.streams.capture import VideoCapture, cannot_open, codec_of, load_opencv, no_frame, why_not_open
from remtta.streams.video import MAX_REFUSED, position_s

MAX_WAITING_BYTES = 256 * 1024**2
"""Memory for undecoded frames that wait for the model; 4K frames take 25 MB each."""

MAX_WAITING = 64
"""Maximum number of waiting frames if every frame counts."""

_POLL_S = 0.1
_TIMED_OUT = 0.9
"""A call that took this share of FFmpeg's timeout is considered timed out. A frame that it still returned is no sign of
life: the decoder was flushed.
"""
_HANGING = 1.1
"""A call that takes this multiple of the timeout hangs, and FFmpeg's own timeout failed."""


@dataclass(frozen=True)
class SourceSpec:
    """A live source, and how to read it."""

    source: str | int  # camera index, device or URL
    connect: Callable[[], VideoCapture]
    stride: int  # only every stride-th frame is used; the others are not converted

    @property
    def name(self) -> str:
        """A path, camera or URL without a password."""
        return f"camera {self.source}" if isinstance(self.source, int) else without_password(self.source)


@dataclass(frozen=True)
class CapturedFrame:
    """A frame as received."""

    number: int
    arrived: float  # by the watchdog's clock
    pixels: np.ndarray | None  # (H, W, 3) uint8, BGR; None if it could not be decoded
    read_at: str | None  # UTC; None in a finite video, so that its rows are reproducible
    position_s: float | None = None  # in a finite video


@dataclass
class Backlog:
    """Limits on waiting frames and the number of dropped ones, over all connections to a source."""

    newest_only: bool  # drop frames instead of waiting
    keep: int = 1  # number of newest frames kept, if older ones are dropped
    dropped: int = 0

    def capacity(self, frame: CapturedFrame) -> int:
        """Return how many frames of this size may wait."""
        num_bytes = 0 if frame.pixels is None else frame.pixels.nbytes
        return min(self.keep if self.drops_for(frame) else MAX_WAITING, max(1, MAX_WAITING_BYTES // max(1, num_bytes)))

    def drops_for(self, frame: CapturedFrame) -> bool:
        """Return True if older frames are dropped to make room for this one; a finite video is read whole."""
        return self.newest_only and frame.read_at is not None


class Watchdog:
    """Times the calls of one connection: detects a source that hangs, or sends nothing that can be decoded.

    Set by the reading thread, queried by the consuming thread as well.

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
        self._created = clock()
        self._undecodable_since: float | None = None
        self._call_began: float | None = self._created  # None while the reading thread waits for room

    def begin_call(self) -> float:
        """Record that a call begins; return the time."""
        self._call_began = now = self.clock()
        return now

    def pause(self) -> None:
        """Record that no call is made until `begin_call`."""
        self._call_began = None

    def is_hanging(self) -> bool:
        """Return True if a call hangs."""
        began = self._call_began
        return began is not None and self._took(_HANGING, began)

    def timed_out(self, began: float | None = None) -> bool:
        """Return True if a call, by default the opening, used up FFmpeg's timeout."""
        return self._took(_TIMED_OUT, self._created if began is None else began)

    def starved(self, since: float) -> bool:
        """Return True if there has been no decodable frame for longer than the timeout."""
        if self.clock() - since < self._read_timeout_s:
            return False
        self.reason = f"no frame that could be decoded within {self._read_timeout_s:g} s"
        return True

    def starved_after(self, decodable: bool) -> bool:
        """Return `starved`, after a frame that could or could not be decoded."""
        if decodable:
            self._undecodable_since = None
            return False
        if self._undecodable_since is None:
            self._undecodable_since = self.clock()
        return self.starved(self._undecodable_since)

    def _took(self, multiple: float, began: float) -> bool:
        missing, limit_s = ("frame", self._read_timeout_s) if self.opened else ("answer", self._open_timeout_s)
        if self.clock() - began < multiple * limit_s:
            return False
        self.reason, self.stalled = f"no {missing} within {limit_s:g} s", True
        return True


class FrameBuffer:
    """Hands frames from the thread that reads a connection to the thread that consumes them.

    The watchdog pauses while there is no room; `closed` is set when no more frames of the source are wanted.
    """

    def __init__(self, backlog: Backlog, watchdog: Watchdog, closed: threading.Event) -> None:
        self._backlog, self._watchdog, self._closed = backlog, watchdog, closed
        self._change = threading.Condition()
        self._waiting: deque[CapturedFrame] = deque()
        self._ended = self._abandoned = False

    @property
    def is_wanted(self) -> bool:
        """True while there is a consumer."""
        return not (self._abandoned or self._closed.is_set())

    def take(self, deadline: float = math.inf) -> CapturedFrame | None:
        """Return the next frame; None at the end, at the deadline, or if a read hangs."""
        with self._change:
            while not self._closed.is_set():
                if self._waiting:
                    self._change.notify_all()
                    return self._waiting.popleft()
                if self._ended:
                    return None
                if self._watchdog.is_hanging() or self._watchdog.clock() >= deadline:
                    self._abandoned = True
                    return None
                self._change.wait(_POLL_S)
        return None

    def put(self, frame: CapturedFrame) -> None:
        """Add a frame, as soon as there is room."""
        capacity = self._backlog.capacity(frame)
        with self._change:
            while self._backlog.drops_for(frame) and len(self._waiting) >= capacity:
                self._waiting.popleft()
                self._backlog.dropped += 1
            while len(self._waiting) >= capacity and self.is_wanted:
                self._watchdog.pause()
                self._change.wait(_POLL_S)
            self._watchdog.begin_call()
            self._waiting.append(frame)
            self._change.notify_all()

    def end(self) -> None:
        """Mark the end: no more frames will be added."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def abandon(self) -> None:
        """Mark that no more frames will be taken."""
        with self._change:
            self._abandoned = True
            self._change.notify_all()


class Connection:
    """A connection to a source, read by a thread.

    A hanging read can be abandoned: the thread is left running, and a new connection opened.

    Attributes:
        frames: Receives the frames.
        number: Number of the next frame.
        promised: Total number of frames according to a finite video's header; else 0.
    """

    def __init__(self, spec: SourceSpec, watchdog: Watchdog, frames: FrameBuffer, number: int) -> None:
        self.number = number
        self.promised = 0
        self.frames = frames
        self._spec, self._watchdog = spec, watchdog
        self._error: Exception | None = None
        self._why_not_open: str | None = None
        self._position_s: float | None = None  # of the last frame, in a finite video
        self._end_reason, self._codec = "the connection ended", ""
        self._thread = threading.Thread(target=self._run, name="remtta-live", daemon=True)
        self._thread.start()

    def close(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end once its current call returns, and wait for that up to `wait_s` seconds."""
        self.frames.abandon()
        self._thread.join(wait_s)

    @property
    def reason(self) -> str:
        """Why there are no more frames."""
        if self._error:
            return " ".join(str(self._error).split()) or type(self._error).__name__
        return self._watchdog.reason or self._end_reason

    @property
    def failed(self) -> bool:
        """True if it ended abnormally."""
        return self._error is not None or self._watchdog.reason is not None

    @property
    def hopeless(self) -> bool:
        """True if it failed for a reason that waiting cannot change."""
        return isinstance(self._error, RemttaError) or self.promised > 0

    def failure(self) -> StreamError:
        """Return the error to raise if the first connection gave no frame."""
        name = self._spec.name
        if isinstance(self._error, RemttaError):
            return StreamError(str(self._error))
        if self._error or self._watchdog.stalled:
            return StreamError(f"{name}: {self.reason}; check the camera or the network")
        if not self._watchdog.opened:
            return StreamError(cannot_open(self._spec.source, self._why_not_open))
        return no_frame(name, self._codec)

    def _run(self) -> None:
        try:
            self._connect()
        except Exception as error:  # mostly OpenCV's own
            self._error = error
        self.frames.end()

    def _connect(self) -> None:
        cv2 = load_opencv("video", StreamError)
        capture = self._spec.connect()
        try:
            if capture.isOpened():
                self._codec = codec_of(capture)
                self.promised = int(max(0, capture.get(cv2.CAP_PROP_FRAME_COUNT)))
                self._read(capture)
            elif not self._watchdog.timed_out():
                self._why_not_open = why_not_open(str(self._spec.source)) if "://" in self._spec.name else None
                self._end_reason = self._why_not_open or "it cannot be opened"
        finally:
            capture.release()  # before the end is announced: a camera can be opened only once

    def _read(self, capture: VideoCapture) -> None:
        watchdog, finite = self._watchdog, self.promised > 0
        watchdog.opened = True
        arrived = watchdog.clock()
        refused, max_refused = 0, MAX_REFUSED if "://" in self._spec.name and not finite else 1
        while self.frames.is_wanted:
            began = watchdog.begin_call()
            grabbed, now = capture.grab(), watchdog.clock()
            stalled = not finite and watchdog.timed_out(began)
            if not grabbed:
                refused += 1
                if stalled or refused >= max_refused or watchdog.starved(arrived):
                    return
                continue
            arrived = began if stalled else now
            for _ in range(refused):  # packets that the decoder rejected; the stream goes on
                if self._is_used():
                    self.frames.put(CapturedFrame(self.number, arrived, None, self._utc(arrived)))
                self.number += 1
            refused = 0
            if self._is_used():
                frame = self._decoded(capture, arrived)
                self.frames.put(frame)
                stalled |= watchdog.starved_after(finite or frame.pixels is not None)
            self.number += 1
            if stalled:
                return

    def _is_used(self) -> bool:
        return self.number % self._spec.stride == 0

    def _decoded(self, capture: VideoCapture, arrived: float) -> CapturedFrame:
        decoded, pixels = capture.retrieve()
        pixels = pixels if decoded and pixels is not None and pixels.size > 0 else None
        if self.promised:
            self._position_s = position_s(capture, self._position_s, self._spec.stride)
        return CapturedFrame(self.number, arrived, pixels, self._utc(arrived), self._position_s)

    def _utc(self, clock_time: float) -> str | None:
        """Convert a time of the clock to UTC; return None in a finite video."""
        if self.promised:
            return None
        then = datetime.now(UTC) - timedelta(seconds=self._watchdog.clock() - clock_time)
        return then.isoformat(timespec="milliseconds")
