"""Decode ahead of the model, in order, a bounded number of frames."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from remtta.streams.frames import Frame, FrameError

_POLL_S = 0.1


@dataclass(frozen=True)
class DecodedFrame:
    """A frame ready for the model, or the reason why it is not.

    Attributes:
        index: Position in the stream, from 0; unreadable frames count.
        source: Path, or the video, camera or URL it came from.
        number: Position in the video, from 0; None for stills.
        time_s: Time in the video, in seconds; None for stills.
        image: Shape (3, H, W), uint8; None if the frame cannot be read.
        error: Why it cannot be read, else None.
    """

    index: int
    source: str
    number: int | None
    time_s: float | None
    image: Tensor | None
    error: str | None = None


def prefetch(
    frames: Iterable[Frame],
    transform: Callable[[Image.Image], Tensor],
    *,
    ahead: int,
    workers: int | None = None,
    wait: Callable[[], None] = lambda: None,
) -> Generator[DecodedFrame]:
    """Read and decode frames in background threads and yield them in stream order.

    Args:
        frames: The stream; it is read from one background thread.
        transform: From an RGB image to a uint8 tensor (3, H, W).
        ahead: Most frames to hold decoded or in decoding.
        workers: Decoding threads; by default one per core, at most 8.
        wait: Called every 0.1 s while no frame is ready; may raise to stop waiting.

    Raises:
        Exception: Whatever reading the stream itself raised, after the frames before it.
    """
    ready: queue.Queue[Future[DecodedFrame] | Exception | None] = queue.Queue(maxsize=max(1, ahead))
    stop = threading.Event()
    pool = ThreadPoolExecutor(workers or min(8, os.cpu_count() or 1), thread_name_prefix="remtta-decode")
    # A daemon: a reader blocked on a pipe or a camera must not keep the process alive.
    reader = threading.Thread(target=_read, args=(frames, transform, pool, ready, stop), daemon=True)
    reader.start()
    try:
        while (item := _next(ready, wait)) is not None:
            if isinstance(item, Exception):
                raise item
            yield item.result()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _next(
    ready: queue.Queue[Future[DecodedFrame] | Exception | None], wait: Callable[[], None]
) -> Future[DecodedFrame] | Exception | None:
    while True:
        try:
            return ready.get(timeout=_POLL_S)
        except queue.Empty:
            wait()


def _read(
    frames: Iterable[Frame],
    transform: Callable[[Image.Image], Tensor],
    pool: ThreadPoolExecutor,
    ready: queue.Queue[Future[DecodedFrame] | Exception | None],
    stop: threading.Event,
) -> None:
    def put(item: Future[DecodedFrame] | Exception | None) -> None:
        while not stop.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    # Video frames arrive decoded and large: keep few of them waiting for a worker.
    waiting = threading.Semaphore(2 * pool._max_workers)

    def decode(index: int, frame: Frame) -> DecodedFrame:
        try:
            return _decode(index, frame, transform)
        finally:
            waiting.release()

    try:
        for index, frame in enumerate(frames):
            while not waiting.acquire(timeout=_POLL_S):
                if stop.is_set():
                    return
            if stop.is_set():
                return
            put(pool.submit(decode, index, frame))
    except Exception as error:  # handed to the consumer, which raises it in its own thread
        put(error)
        return
    put(None)


def _decode(index: int, frame: Frame, transform: Callable[[Image.Image], Tensor]) -> DecodedFrame:
    image, error = None, None
    try:
        image = transform(frame.load())
    except FrameError as problem:
        error = str(problem)
    except Exception as problem:  # an image of extreme shape can defeat resizing: report it, keep going
        error = f"cannot be preprocessed: {str(problem).strip() or type(problem).__name__}"
    return DecodedFrame(index, frame.source, frame.number, frame.time_s, image, error)
