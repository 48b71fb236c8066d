"""Decode a bounded number of frames ahead of the model, in order."""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from dataclasses import dataclass, field

from PIL import Image
from torch import Tensor

from remtta.errors import FrameError
from remtta.machine import num_cores
from remtta.streams.decoding_memory import PictureMemory, decoding_bytes
from remtta.streams.frames import Frame, Gap

_POLL_S = 0.1
_JOIN_TIMEOUT_S = 0.3  # longer than a poll


@dataclass(frozen=True)
class DecodedFrame:
    """A frame ready for the model, or the reason why it is not; see `Frame` for the other fields."""

    index: int  # in the stream, from 0; includes unreadable frames
    source: str
    number: int | None
    time_s: float | None
    image: Tensor | None  # (3, H, W), uint8; None if the frame cannot be read
    error: str | None = None
    gap: Gap | None = None
    read_at: str | None = None
    read_s: float = field(default=0.0, compare=False)  # duration of reading it from the source
    decode_s: float = field(default=0.0, compare=False)  # duration of decoding and preprocessing


PAUSE = DecodedFrame(index=-1, source="", number=None, time_s=None, image=None)
"""Yielded in place of a frame while the source pauses."""


def prefetch(
    frames: Iterable[Frame],
    transform: Callable[[Image.Image], Tensor],
    *,
    ahead: int,
    first: int = 0,
    workers: int | None = None,
    max_bytes: int | None = None,
    demand: threading.Semaphore | None = None,
    wait: Callable[[], None] = lambda: None,
    paused: Callable[[], bool] = lambda: False,
) -> Generator[DecodedFrame]:
    """Read and decode frames in background threads and yield them in stream order; any exception from reading the
    stream is raised after the frames before it.

    Args:
        transform: From an RGB image to a uint8 tensor (3, H, W).
        ahead: Maximum number of frames decoded or being decoded.
        workers: Decoding threads; by default one per core, at most 8.
        max_bytes: Memory for decoding one picture; by default a quarter of the machine's, at most 2 GiB.
        demand: Acquired before each frame is read, so that none is read before it is wanted.
        wait: Called every 0.1 s while no frame is ready; may raise to stop waiting.
        paused: Called as often; while it returns true, `PAUSE` is yielded.
    """
    ready: queue.SimpleQueue[futures.Future[DecodedFrame] | Exception | None] = queue.SimpleQueue()
    room = threading.Semaphore(max(1, ahead))
    stop = threading.Event()
    num_workers = workers or decoding_threads()
    undecoded = threading.Semaphore(2 * num_workers)  # video frames arrive large: keep few of them waiting
    pool = futures.ThreadPoolExecutor(num_workers, thread_name_prefix="remtta-decode")
    limit = max_bytes or decoding_bytes(None)

    def read() -> None:
        try:
            numbered = enumerate(frames, first)
            while demand is None or _acquire(demand, stop):
                began = time.monotonic()
                index, frame = next(numbered, (0, None))
                read_s = time.monotonic() - began
                if frame is None:
                    break
                if not (_acquire(room, stop) and _acquire(undecoded, stop)):
                    return
                decoded = pool.submit(_decode, transform, limit, index, frame, read_s)
                decoded.add_done_callback(lambda _: undecoded.release())
                ready.put(decoded)
        except Exception as error:  # raised again in the consumer's thread
            ready.put(error)
            return
        ready.put(None)

    # A daemon thread: a reader blocked on a pipe or a camera must not keep the process alive.
    reader = threading.Thread(target=contextvars.copy_context().run, args=(read,), daemon=True)
    reader.start()
    try:
        while True:
            try:
                item = ready.get(timeout=_POLL_S)
            except queue.Empty:
                wait()
                if paused():
                    yield PAUSE
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            while not futures.wait([item], _POLL_S).done:
                wait()
            room.release()
            yield item.result()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        reader.join(_JOIN_TIMEOUT_S)


def decoding_threads(num_streams: int = 1) -> int:
    """Return the number of threads for each of several streams: one per core, at most 8."""
    return min(8, max(1, num_cores() // num_streams))


def _acquire(semaphore: threading.Semaphore, stop: threading.Event) -> bool:
    """Acquire a semaphore; return False once no more frames are wanted."""
    while not stop.is_set():
        if semaphore.acquire(timeout=_POLL_S):
            return not stop.is_set()
    return False


def _decode(
    transform: Callable[[Image.Image], Tensor], limit: int, index: int, frame: Frame, read_s: float
) -> DecodedFrame:
    image, error, began = None, None, time.monotonic()
    try:
        with PictureMemory(limit):
            image = transform(frame.load())
    except FrameError as problem:
        error = str(problem)
    except Exception as problem:  # e.g. an extreme aspect ratio can defeat resizing: report it, and continue
        error = f"cannot be preprocessed: {str(problem).strip() or type(problem).__name__}"
    decode_s = time.monotonic() - began
    source = frame.source, frame.number, frame.time_s
    return DecodedFrame(index, *source, image, error, frame.gap, frame.read_at, read_s, decode_s)
