"""The frames of a stream in batches, read and decoded ahead of the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

from remtta.errors import StreamError
from remtta.models.preprocessing import Preprocessing
from remtta.options import RunOptions
from remtta.streams.decoding_budget import Budget, decoding_bytes
from remtta.streams.frames import Frame
from remtta.streams.prefetch import PAUSE, DecodedFrame, prefetch
from remtta.streams.sources import Stream

BATCHES_AHEAD = 2  # decoded frames waiting for the model, in batches
MOST_WAITING = 4  # batches' worth of frames, most of them unreadable, that wait for a batch to be full
LIVE_FLUSH_AFTER_S = 2.0  # the default of --flush-after on a camera or network stream
LOST_S = 2.0  # a live source that is away for longer is not waited for to fill a batch


def decoding_budget(options: RunOptions, preprocessing: Preprocessing) -> Budget:
    """Return what decoding a run's frames may take."""
    return Budget(decoding_bytes(options.max_memory), preprocessing.resized_bytes)


def flush_after(stream: Stream, options: RunOptions) -> float | None:
    """Return the seconds after which a frame is predicted without its batch: by default few on a live source."""
    live = stream.live_source
    if options.flush_after is None and live is not None and not live.finite:
        return LIVE_FLUSH_AFTER_S
    return options.flush_after


class Early(list[DecodedFrame]):
    """Frames that have waited long enough to be predicted; they come again, with their batch."""


class Waiting:
    """The frames that wait for their batch to be full, and since when."""

    def __init__(
        self, most_s: Callable[[], float | None] = lambda: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Predict frames without their batch after `most_s()` seconds; None for never."""
        self._most_s, self._clock = most_s, clock
        self._since: float | None = None
        self._told = 0
        self.frames: list[DecodedFrame] = []

    def add(self, frame: DecodedFrame) -> None:
        """Take one more frame."""
        self.frames.append(frame)
        self._since = self._clock() if self._since is None else self._since

    @property
    def due(self) -> bool:
        """True if those not told yet have waited long enough."""
        most_s = self._most_s()
        return most_s is not None and self._since is not None and self._clock() - self._since >= most_s

    def tell(self) -> Early:
        """Those that nobody was told of yet."""
        early, self._told, self._since = Early(self.frames[self._told :]), len(self.frames), None
        return early

    def take(self) -> list[DecodedFrame]:
        """The whole batch, after which the next begins."""
        batch, self.frames, self._told, self._since = self.frames, [], 0, None
        return batch


class Batches:
    """A stream's frames, decoded ahead and in batches.

    A live source of which only the newest frames count is read no sooner than
    its frames are wanted: those read ahead would be old ones by then. `memory`
    is what decoding may take, where others share it.
    """

    def __init__(
        self, stream: Stream, options: RunOptions, preprocessing: Preprocessing, memory: Budget | None = None
    ) -> None:
        self._live = stream.live_source
        self._size, self._stops_at_errors = options.batch_size, options.on_error == "stop"
        self._preprocessing = preprocessing
        self._waiting = Waiting(partial(flush_after, stream, options))
        self._memory = memory or decoding_budget(options, preprocessing)
        self._demand: threading.Semaphore | None = None
        if self._live is not None and self._live.newest_only:
            self._live.keep(self._size)
            self._demand = threading.Semaphore(self._size)

    def decoded(self, frames: Iterator[Frame], *, first: int, wait: Callable[[], None]) -> Generator[DecodedFrame]:
        """The frames, ready for the model, and `PAUSE` while the source is away.

        Args:
            frames: Those of the stream that are still to be seen.
            first: Index of the first.
            wait: Called while none is ready; may raise to stop waiting.
        """
        return prefetch(
            frames,
            self._preprocessing.transform(),
            ahead=BATCHES_AHEAD * self._size,
            first=first,
            memory=self._memory,
            demand=self._demand,
            wait=wait,
            paused=lambda: self._is_lost() or self._waiting.due,
        )

    def of(self, frames: Iterable[DecodedFrame]) -> Iterator[list[DecodedFrame]]:
        """The frames in batches, as `in_batches` has them."""
        return in_batches(
            frames,
            self._size,
            stop_at_errors=self._stops_at_errors,
            wants=self._want,
            waiting=self._waiting,
            lost=self._is_lost,
        )

    def waiting(self) -> Early:
        """Frames that wait for their batch and were not predicted yet."""
        return self._waiting.tell()

    def _want(self, num_frames: int) -> None:
        if self._demand and num_frames:
            self._demand.release(num_frames)

    def _is_lost(self) -> bool:
        return self._live is not None and self._live.seconds_lost > LOST_S


def in_batches(
    frames: Iterable[DecodedFrame],
    size: int,
    *,
    stop_at_errors: bool = False,
    wants: Callable[[int], None] = lambda count: None,
    waiting: Waiting | None = None,
    lost: Callable[[], bool] = lambda: True,
) -> Iterator[list[DecodedFrame]]:
    """Batches of as many readable frames as an update takes, unreadable ones in their places between them.

    Where nearly all are unreadable, a batch is not waited for: it then has fewer readable ones.
    A stream that fails still has the frames before that predicted, as has a live source that is away for a while.

    Args:
        frames: Decoded, in order; at `PAUSE` none is to come for a while.
        size: Readable frames of a full batch.
        stop_at_errors: End a batch with an unreadable frame.
        wants: Called with how many more frames may be read: one in an unreadable one's place, and a batch's once it
            is done with.
        waiting: Holds the frames that wait, and says when they are to come as `Early` ones.
        lost: Asked at a pause: True if the source is away, which ends the batch.
    """
    waiting = waiting or Waiting()
    readable = 0
    try:
        for frame in frames:
            if frame is not PAUSE:
                waiting.add(frame)
                readable += frame.image is not None
                wants(frame.image is None)
                # An unreadable frame that no readable one waits for need not wait either.
                full = readable in (0, size) or len(waiting.frames) >= MOST_WAITING * size
                ends = full or bool(frame.error and stop_at_errors)
            else:
                ends = lost()
            if ends and waiting.frames:
                yield waiting.take()
                wants(readable)
                readable = 0
            elif waiting.due:
                yield waiting.tell()
    except StreamError:
        if waiting.frames:
            yield waiting.take()
        raise
    if waiting.frames:
        yield waiting.take()
