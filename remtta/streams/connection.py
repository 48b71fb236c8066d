"""A connection to a live source, and the thread that reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from remtta.errors import RemttaError, StreamError, without_password
from remtta.streams.addresses import why_not_open
from remtta.streams.buffer import CapturedFrame, FrameBuffer
from remtta.streams.opencv import load_opencv
from remtta.streams.video import MAX_REFUSED, cannot_open, codec_of, no_frame_advice, position_s
from remtta.streams.watchdog import Watchdog


@dataclass(frozen=True)
class SourceSpec:
    """A live source, and how to read it."""

    source: str | int  # camera index, device or URL
    connect: Callable[[], Any]  # returns a cv2.VideoCapture
    stride: int  # only every stride-th frame is used; the others are not converted

    @property
    def name(self) -> str:
        """A path, camera or URL without a password."""
        return f"camera {self.source}" if isinstance(self.source, int) else without_password(self.source)


class Connection:
    """A connection to a source, read by its own thread.

    A hanging read can be abandoned: the thread is left running, and a new connection opened.

    Attributes:
        shots: Receives the frames.
        number: Number of the next frame.
        promised: Total number of frames according to a finite video's header; else 0.
    """

    def __init__(self, feed: SourceSpec, watchdog: Watchdog, shots: FrameBuffer, number: int) -> None:
        self.number = number
        self.promised = 0
        self.shots = shots
        self._feed, self._watchdog = feed, watchdog
        self._error: Exception | None = None
        self._why_not_open: str | None = None
        self._position_s: float | None = None  # of the last frame, in a finite video
        self._end, self._codec = "the connection ended", ""
        self._thread = threading.Thread(target=self._run, name="remtta-live", daemon=True)
        self._thread.start()

    def leave(self, wait_s: float = 0.0) -> None:
        """Ask the thread to end once its current call returns, and wait for that up to `wait_s` seconds."""
        self.shots.leave()
        self._thread.join(wait_s)

    @property
    def reason(self) -> str:
        """Why there are no more frames."""
        if self._error:
            return " ".join(str(self._error).split()) or type(self._error).__name__
        return self._watchdog.reason or self._end

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
        name = self._feed.name
        if isinstance(self._error, RemttaError):
            return StreamError(str(self._error))
        if self._error or self._watchdog.stalled:
            return StreamError(f"{name}: {self.reason}; check the camera or the network")
        if not self._watchdog.opened:
            return StreamError(cannot_open(self._feed.source, self._why_not_open))
        return StreamError(f"{name}: no frame could be decoded; {no_frame_advice(name, self._codec)}")

    def _run(self) -> None:
        try:
            self._connect()
        except Exception as error:  # mostly OpenCV's own
            self._error = error
        self.shots.end()

    def _connect(self) -> None:
        cv2 = load_opencv("video", StreamError)
        capture = self._feed.connect()
        try:
            if capture.isOpened():
                self._codec = codec_of(cv2, capture)
                self.promised = int(max(0, capture.get(cv2.CAP_PROP_FRAME_COUNT)))
                self._read(cv2, capture)
            elif not self._watchdog.timed_out():
                self._why_not_open = why_not_open(str(self._feed.source)) if "://" in self._feed.name else None
                self._end = self._why_not_open or "it cannot be opened"
        finally:
            capture.release()  # before the end is announced: a camera can be opened only once

    def _read(self, cv2: Any, capture: Any) -> None:
        watchdog, finite = self._watchdog, self.promised > 0
        arrived = watchdog.open()
        refused, tries = 0, MAX_REFUSED if "://" in self._feed.name and not finite else 1
        while self.shots.is_wanted:
            began = watchdog.wake()
            grabbed, now = capture.grab(), watchdog.clock()
            stalled = not finite and watchdog.timed_out(began)
            if not grabbed:
                refused += 1
                if stalled or refused >= tries or watchdog.starves(arrived):
                    return
                continue
            arrived = began if stalled else now
            for _ in range(refused):  # packets that the decoder rejected; the stream goes on
                if self._is_taken():
                    self.shots.put(CapturedFrame(self.number, arrived, None, self._utc(arrived)))
                self.number += 1
            refused = 0
            if self._is_taken():
                shot = self._decoded(cv2, capture, arrived)
                self.shots.put(shot)
                stalled |= watchdog.is_starved_after(finite or shot.pixels is not None)
            self.number += 1
            if stalled:
                return

    def _is_taken(self) -> bool:
        return self.number % self._feed.stride == 0

    def _decoded(self, cv2: Any, capture: Any, arrived: float) -> CapturedFrame:
        decoded, pixels = capture.retrieve()
        whole = decoded and pixels is not None and pixels.size > 0
        if self.promised:
            self._position_s = position_s(cv2, capture, self._position_s, self._feed.stride)
        return CapturedFrame(self.number, arrived, pixels if whole else None, self._utc(arrived), self._position_s)

    def _utc(self, clock_time: float) -> str | None:
        """Convert a time of the clock to a UTC date, for live sources."""
        if self.promised:
            return None
        then = datetime.now(UTC) - timedelta(seconds=self._watchdog.clock() - clock_time)
        return then.isoformat(timespec="milliseconds")
