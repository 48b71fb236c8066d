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
from remtta.options import LiveOptions
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


def name_of(source: str | int) -> str:
    """Return a camera's number, or a path or URL without its password, for messages."""
    return f"camera {source}" if isinstance(source, int) else without_password(source)


@dataclass(frozen=True)
class CapturedFrame:
    """A frame as received."""

    number: int
    arrived: float  # by the source's clock
    pixels: np.ndarray | None  # (H, W, 3) uint8, BGR; None if it could not be decoded
    read_at: str | None  # UTC; None in a finite video, so that its rows are reproducible
    position_s: float | None = None  # in a finite video


@dataclass
class Backlog:
    """Limits on waiting frames and the number of dropped ones, over all connections to a source."""

    newest_only: bool  # drop frames instead of waiting, unless it is a finite video
    keep: int = 1  # number of newest frames kept, if older ones are dropped
    dropped: int = 0


class Connection:
    """A connection to a camera or URL, read by a thread, which is left running if a read hangs. Only every stride-th
    frame is converted; `closed` is set when no more are wanted.
    """

    def __init__(
        self,
        source: str | int,
        connect: Callable[[], VideoCapture],
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
        self._stalled = False  # True if a single call timed out
        self._call_began: float | None = clock()  # None while the reading thread waits for room
        self._undecodable_since: float | None = None
        self._error: Exception | None = None
        self._timed_out: str | None = None  # what was missing for too long
        self._why_not_open: str | None = None
        self._position_s: float | None = None  # of the last frame, in a finite video
        self._end_reason, self._codec = "the connection ended", ""
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
                began = self._call_began
                if (began is not None and self._took(_HANGING, began)) or self._clock() >= deadline:
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
        if self._error:
            reason = getattr(self._error, "strerror", None) or str(self._error)
            return " ".join(reason.split()) or type(self._error).__name__
        return self._timed_out or self._end_reason

    @property
    def failed(self) -> bool:
        """True if it ended abnormally."""
        return self._error is not None or self._timed_out is not None

    @property
    def hopeless(self) -> bool:
        """True if it failed for a reason that waiting cannot change."""
        return isinstance(self._error, RemttaError) or self.promised > 0

    def failure(self) -> StreamError:
        """Return the error to raise if the first connection gave no frame."""
        name = name_of(self._source)
        if isinstance(self._error, RemttaError):
            return StreamError(str(self._error))
        if self._error or self._stalled:
            return StreamError(f"{name}: {self.reason}; check the camera or the network")
        if not self._opened:
            return StreamError(cannot_open(self._source, self._why_not_open))
        return no_frame(name, self._codec)

    def _run(self) -> None:
        try:
            cv2, began = load_opencv("video", StreamError), self._clock()
            capture = self._connect()
            try:
                if capture.isOpened():
                    self._codec = codec_of(capture)
                    self.promised = int(max(0, capture.get(cv2.CAP_PROP_FRAME_COUNT)))
                    self._read(capture)
                elif not self._took(_TIMED_OUT, began):
                    self._why_not_open = why_not_open(str(self._source)) if "://" in str(self._source) else None
                    self._end_reason = self._why_not_open or "it cannot be opened"
            finally:
                capture.release()  # before the end is announced: a camera can be opened only once
        except Exception as error:  # mostly OpenCV's own
            self._error = error
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _read(self, capture: VideoCapture) -> None:
        finite = self.promised > 0
        self._opened = True
        arrived = self._clock()
        refused, max_refused = 0, MAX_REFUSED if "://" in str(self._source) and not finite else 1
        while self._is_wanted:
            self._call_began = began = self._clock()
            grabbed, now = capture.grab(), self._clock()
            stalled = not finite and self._took(_TIMED_OUT, began)
            if not grabbed:
                refused += 1
                if stalled or refused >= max_refused or self._is_starved(arrived):
                    return
                continue
            arrived = began if stalled else now
            for _ in range(refused):  # packets that the decoder rejected; the stream goes on
                if self.number % self._stride == 0:
                    self._put(arrived, None)
                self.number += 1
            refused = 0
            if self.number % self._stride == 0:
                decoded, pixels = capture.retrieve()
                pixels = pixels if decoded and pixels is not None and pixels.size > 0 else None
                if finite:
                    self._position_s = position_s(capture, self._position_s, self._stride)
                self._put(arrived, pixels)
                if finite or pixels is not None:
                    self._undecodable_since = None
                elif self._undecodable_since is None:
                    self._undecodable_since = self._clock()
                stalled |= self._undecodable_since is not None and self._is_starved(self._undecodable_since)
            self.number += 1
            if stalled:
                return

    @property
    def _is_wanted(self) -> bool:
        return not (self._abandoned or self._closed.is_set())

    def _put(self, arrived: float, pixels: np.ndarray | None) -> None:
        """Hand a frame to the consumer, as soon as there is room."""
        then = datetime.now(UTC) - timedelta(seconds=self._clock() - arrived)
        read_at = None if self.promised else then.isoformat(timespec="milliseconds")
        frame = CapturedFrame(self.number, arrived, pixels, read_at, self._position_s)
        drops = self._backlog.newest_only and not self.promised
        num_bytes = 0 if pixels is None else pixels.nbytes
        most = self._backlog.keep if drops else MAX_WAITING
        capacity = min(most, max(1, MAX_WAITING_BYTES // max(1, num_bytes)))
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

    def _took(self, multiple: float, began: float) -> bool:
        """Return True, and note it, if a call has taken this multiple of its timeout."""
        opened, options = self._opened, self._options
        missing, limit_s = ("frame", options.read_timeout_s) if opened else ("answer", options.open_timeout_s)
        if self._clock() - began < multiple * limit_s:
            return False
        self._timed_out, self._stalled = f"no {missing} within {limit_s:g} s", True
        return True

    def _is_starved(self, since: float) -> bool:
        """Return True, and note it, if there has been no decodable frame for longer than the timeout."""
        limit_s = self._options.read_timeout_s
        if self._clock() - since < limit_s:
            return False
        self._timed_out = f"no frame that could be decoded within {limit_s:g} s"
        return True
