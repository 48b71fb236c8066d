"""Batches of a stream's frames, read and decoded ahead of the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from remtta.errors import StreamError
from remtta.models.preprocessing import Preprocessing
from remtta.options import RunOptions
from remtta.streams.decoding_memory import decoding_bytes
from remtta.streams.frames import Frame
from remtta.streams.live import LiveSource
from remtta.streams.prefetch import PAUSE, DecodedFrame, prefetch

BATCHES_AHEAD = 2  # decoded frames ahead of the model, in batches
_MAX_BATCHES_WAITING = 4  # batches' worth of mostly unreadable frames that may wait for a full batch
LIVE_FLUSH_AFTER_S = 2.0  # the default of --flush-after on a camera or network stream
LOST_S = 2.0  # how long a batch waits for a lost live source


@dataclass(frozen=True)
class Batch:
    """Frames that are predicted, and perhaps learned from, together."""

    frames: Sequence[DecodedFrame]  # in stream order; K of them are readable
    labels: Tensor | None = None  # class indices (K,) of the readable ones, if known
    learn: bool = True  # whether the method may learn from them
    early: bool = False  # whether they are only predicted now, and come again with the rest of their batch
    num_reported: int = 0  # leading frames whose predictions were reported early; see `BatchResult.unreported`

    @property
    def readable(self) -> list[DecodedFrame]:
        """The frames with an image."""
        return [frame for frame in self.frames if frame.image is not None]


class Batches:
    """A stream's frames, decoded ahead, in batches.

    If only the newest frames of a live source count, frames are read only on demand: frames read ahead would be
    outdated.
    """

    def __init__(
        self,
        live: LiveSource | None,
        options: RunOptions,
        preprocessing: Preprocessing,
        *,
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._live = live
        self._size, self._stops_at_errors = options.batch_size, options.on_error == "stop"
        self._preprocessing = preprocessing
        self._waiting: list[DecodedFrame] = []  # for a full batch
        self._num_early = 0  # how many of them an early batch had
        self._waiting_since: float | None = None  # arrival of the first of the others
        self._clock, self._flush_after = clock, options.flush_after
        self._workers, self._max_bytes = workers, decoding_bytes(options.max_memory)
        self._demand: threading.Semaphore | None = None
        if self._live is not None and self._live.backlog.newest_only:
            self._live.backlog.keep = self._size
            self._demand = threading.Semaphore(self._size)

    def decoded(self, frames: Iterator[Frame], *, first: int, wait: Callable[[], None]) -> Generator[DecodedFrame]:
        """Yield the frames, ready for the model, and `PAUSE` while the source is unavailable.

        While none is ready, `wait` is called, which may raise to stop waiting.
        """
        return prefetch(
            frames,
            self._preprocessing.transform(),
            ahead=BATCHES_AHEAD * self._size,
            first=first,
            workers=self._workers,
            max_bytes=self._max_bytes,
            demand=self._demand,
            wait=wait,
            paused=lambda: self._is_lost() or self._is_due,
        )

    def batched(self, frames: Iterable[DecodedFrame]) -> Iterator[Batch]:
        """Yield batches of readable frames, with unreadable ones in their places; and early ones of waiting frames.

        A batch does not wait long if nearly all frames are unreadable; it then has fewer readable ones. If the stream
        fails, or a live source is lost for a while, the frames before that are still yielded.
        """
        readable = 0
        try:
            for frame in frames:
                if frame is not PAUSE:
                    self._waiting.append(frame)
                    self._waiting_since = self._clock() if self._waiting_since is None else self._waiting_since
                    readable += frame.image is not None
                    if self._demand and frame.image is None:
                        self._demand.release()  # the next may be read at once
                    # With no readable frame waiting, an unreadable one need not wait either.
                    full = readable in (0, self._size) or len(self._waiting) >= _MAX_BATCHES_WAITING * self._size
                    ends = full or bool(frame.error and self._stops_at_errors)
                else:
                    ends = self._is_lost()
                if ends and self._waiting:
                    yield self._take_batch()
                    if self._demand and readable:
                        self._demand.release(readable)
                    readable = 0
                elif self._is_due:
                    yield self.early_batch()
        except StreamError:
            if self._waiting:
                yield self._take_batch()
            raise
        if self._waiting:
            yield self._take_batch()

    def early_batch(self) -> Batch:
        """Return the frames that wait for a full batch and were in no early one yet."""
        early = Batch(self._waiting[self._num_early :], early=True)
        self._num_early, self._waiting_since = len(self._waiting), None
        return early

    @property
    def _is_due(self) -> bool:
        """True if frames that were in no early batch yet have waited long enough."""
        max_s = self._flush_after
        if max_s is None and self._live is not None and not self._live.finite:
            max_s = LIVE_FLUSH_AFTER_S
        return max_s is not None and self._waiting_since is not None and self._clock() - self._waiting_since >= max_s

    def _take_batch(self) -> Batch:
        """Return the whole batch, and start the next."""
        batch = Batch(self._waiting, num_reported=self._num_early)
        self._waiting, self._num_early, self._waiting_since = [], 0, None
        return batch

    def _is_lost(self) -> bool:
        return self._live is not None and self._live.seconds_lost > LOST_S
