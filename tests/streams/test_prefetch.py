import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from remtta.errors import FrameError, StreamError
from remtta.streams.frames import Frame
from remtta.streams.prefetch import prefetch
from tests.conftest import happens, raising


class Stop(BaseException):
    """Raised by `wait`, like a signal; not an Exception."""


def to_tensor(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).expand(3, 1, 1)


def grey_frame(value: int, delay_s: float = 0.0) -> Frame:
    """Return a one-pixel frame that takes some time to load."""

    def load() -> Image.Image:
        time.sleep(delay_s)
        return Image.new("L", (1, 1), value)

    return Frame(f"{value}.png", load)


class Gate:
    """Frames that count how many have started to load, and load only once the gate is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.num_started = 0
        self._lock = threading.Lock()

    def frames(self) -> Iterator[Frame]:
        return (Frame(f"{number}.png", self._load) for number in range(100))

    def settles_at(self, num_started: int) -> bool:
        started = happens(lambda: self.num_started >= num_started)
        return started and not happens(lambda: self.num_started > num_started, within_s=0.15)

    def _load(self) -> Image.Image:
        with self._lock:
            self.num_started += 1
        self.opened.wait(5)
        self.opened.set()  # a test that fails ends
        return Image.new("L", (1, 1))


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def counted(frames: Iterable[Frame], read: list[int]) -> Iterator[Frame]:
    """Pass frames on, and append the number of every frame that is read."""
    for number, frame in enumerate(frames):
        read.append(number)
        yield frame


def raise_after(calls: int, once: Callable[[], bool] = lambda: True) -> Callable[[], None]:
    """Return a `wait` that raises after this many calls at which the condition held."""
    left = itertools.count(calls - 1, -1)

    def wait() -> None:
        if once() and next(left) == 0:
            raise Stop

    return wait


@pytest.mark.parametrize(("ahead", "workers"), [(1, 8), (3, 1), (100, 8)])
def test_frames_come_in_stream_order_whatever_their_loading_takes(ahead: int, workers: int) -> None:
    rng = random.Random(0)
    frames = [grey_frame(value, rng.uniform(0, 0.01)) for value in range(30)]
    decoded = list(prefetch(frames, to_tensor, ahead=ahead, workers=workers))
    assert [frame.index for frame in decoded] == list(range(30))
    assert [frame.source for frame in decoded] == [f"{value}.png" for value in range(30)]
    images = [frame.image.flatten().tolist() for frame in decoded if frame.image is not None]
    assert images == [[value] * 3 for value in range(30)]


def test_unreadable_frames_keep_their_positions_and_have_a_reason() -> None:
    frames = [
        grey_frame(0, 0.02),
        Frame("cut.jpg", raising(FrameError("image file is truncated"))),
        grey_frame(2),
        Frame("odd.jpg", raising(ValueError("height and width must be > 0"))),
        Frame("mute.jpg", raising(MemoryError())),
        grey_frame(5),
    ]
    decoded = list(prefetch(frames, to_tensor, ahead=4))
    assert [frame.index for frame in decoded] == list(range(6))
    assert [frame.image is None for frame in decoded] == [False, True, False, True, True, False]
    message = [f"cannot be preprocessed: {why}" for why in ("height and width must be > 0", "MemoryError")]
    assert [frame.error for frame in decoded] == [None, "image file is truncated", None, *message, None]


@pytest.mark.parametrize("ahead", [1, 10])
def test_an_error_of_the_stream_is_raised_after_the_frames_before_it(ahead: int) -> None:
    def frames() -> Iterator[Frame]:
        yield from (grey_frame(value, 0.02) for value in range(3))
        raise StreamError("the camera is gone")

    seen = []
    with pytest.raises(StreamError, match=r"^the camera is gone$"):
        for frame in prefetch(frames(), to_tensor, ahead=ahead):
            seen.append(frame.index)
    assert seen == [0, 1, 2]


def test_no_more_than_ahead_frames_are_held_for_a_slow_consumer(gate: Gate) -> None:
    gate.opened.set()
    frames = prefetch(gate.frames(), to_tensor, ahead=4, workers=8)
    for taken in (1, 2):
        next(frames)
        assert gate.settles_at(taken + 4)
    frames.close()


def test_few_frames_wait_for_a_worker(gate: Gate) -> None:
    wait, read = raise_after(3, once=lambda: gate.num_started >= 2), list[int]()
    with pytest.raises(Stop):
        list(prefetch(counted(gate.frames(), read), to_tensor, ahead=1000, workers=2, wait=wait))
    assert gate.num_started == 2
    assert len(read) <= 2 * 2 + 1  # two per worker, and the one in the reader's hand


def test_no_frame_is_read_before_it_is_wanted() -> None:
    demand, read = threading.Semaphore(2), list[int]()
    frames = prefetch(counted(map(grey_frame, range(5)), read), to_tensor, ahead=4, demand=demand)
    assert [next(frames).index for _ in range(2)] == [0, 1]
    assert not happens(lambda: len(read) > 2, within_s=0.15) and len(read) == 2
    demand.release(3)
    assert [next(frames).index for _ in range(3)] == [2, 3, 4]
    demand.release()  # for the end
    assert list(frames) == []


def test_wait_may_stop_a_stream_that_has_no_frame() -> None:
    released = threading.Event()

    def silent() -> Iterator[Frame]:
        released.wait(10)
        yield grey_frame(0)

    try:
        with pytest.raises(Stop):
            list(prefetch(silent(), to_tensor, ahead=4, wait=raise_after(2)))
    finally:
        released.set()


def test_the_stream_is_read_in_the_context_of_its_user() -> None:
    name: ContextVar[str] = ContextVar("name", default="nobody")
    seen: list[str] = []

    def frames() -> Iterator[Frame]:
        seen.append(name.get())
        yield from ()

    name.set("north")
    assert not list(prefetch(frames(), to_tensor, ahead=1)) and seen == ["north"]
