"""The frames of a stream in batches, read and decoded ahead of the model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator

from remtta.errors import StreamError
from remtta.models.preprocessing import Preprocessing
from remtta.options import RunOptions
from remtta.streams.frames import Frame
from remtta.streams.memory import Budget, decoding_bytes
from remtta.streams.prefetch import PAUSE, DecodedFrame, prefetch
from remtta.streams.sources import Stream

BATCHES_AHEAD = 2  # decoded frames waiting for the model, in batches
MOST_WAITING = 4  # batches' worth of frames, most of them unreadable, that wait for a batch to be full
LOST_S = 2.0  # a live source that is away for longer is not waited for to fill a batch


class Batches:
    """A stream's frames, decoded ahead and in batches.

    A live source of which only the newest frames count is read no sooner than
    its frames are wanted: those read ahead would be old ones by then.

    Args:
        stream: Where the frames come from.
        options: How many make a batch, and what happens at one that cannot be read.
        preprocessing: From an image to the model's input.
    """

    def __init__(self, stream: Stream, options: RunOptions, preprocessing: Preprocessing) -> None:
        self._live = stream.live_source
        self._size, self._stops_at_errors = options.batch_size, options.on_error == "stop"
        self._preprocessing = preprocessing
        self._memory = Budget(decoding_bytes(options.max_memory), preprocessing.resized_bytes)
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
            paused=self._is_lost,
        )

    def of(self, frames: Iterable[DecodedFrame]) -> Iterator[list[DecodedFrame]]:
        """The frames in batches, as `in_batches` has them."""
        return in_batches(frames, self._size, stop_at_errors=self._stops_at_errors, wants=self._want)

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
) -> Iterator[list[DecodedFrame]]:
    """Batches of as many readable frames as an update takes, unreadable ones in their places between them.

    Where nearly all are unreadable, a batch is not waited for: it then has fewer readable ones.
    A stream that fails still has the frames before that predicted, as has a live source that is away for a while.

    Args:
        frames: Decoded, in order; `PAUSE` ends a batch.
        size: Readable frames of a full batch.
        stop_at_errors: End a batch with an unreadable frame.
        wants: Called with how many more frames may be read: one in an unreadable one's place, and a batch's once it
            is done with.
    """
    batch: list[DecodedFrame] = []
    readable = 0
    try:
        for frame in frames:
            if frame is not PAUSE:
                batch.append(frame)
                readable += frame.image is not None
                wants(frame.image is None)
                # An unreadable frame that no readable one waits for need not wait either.
                full = readable in (0, size) or len(batch) >= MOST_WAITING * size
                if not (full or (frame.error and stop_at_errors)):
                    continue
            if batch:
                yield batch
                wants(readable)
                batch, readable = [], 0
    except StreamError:
        if batch:
            yield batch
        raise
    if batch:
        yield batch
