"""Fake cameras that play a script, and a clock that advances only while something sleeps."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from PIL import Image

from remtta.options import LiveOptions
from remtta.streams.frames import CannotOpen, Frame, Picture, undecodable
from remtta.streams.live import LiveSource
from tests.conftest import draw_image

UNDECODABLE, HANGS, GATE = "undecodable", "hangs", "gate"
REFUSED = None
Script = list[Any] | None

released = threading.Event()
"""Set when the reads that hang are to return; `no_thread_is_left` does so at a test's end."""


class Clock:
    """Time that advances only while something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class FakeCapture:
    """Plays a script of grey levels, pixel arrays or exceptions; the connection ends with the script."""

    codec = ""

    def __init__(self, script: Script, promised: int = 0) -> None:
        if script is REFUSED:
            raise CannotOpen("it cannot be opened")
        self.steps, self.num_frames = iter(script), promised
        self.num_read = 0
        self.closed = False
        self.gate = threading.Event()
        self.step: Any = None

    def read(self) -> Picture | None:
        self.step = next(self.steps, None)
        if self.step is GATE:
            self.gate.wait(20)
            self.step = next(self.steps)
        if self.step is HANGS:
            released.wait(20)
            return None
        if isinstance(self.step, Exception):
            raise self.step
        if self.step is None:
            return None
        self.num_read += 1
        if self.step is UNDECODABLE:
            return undecodable()
        pixels = self.step if isinstance(self.step, np.ndarray) else np.full((36, 40, 3), self.step, np.uint8)
        return Picture(pixels.shape[1::-1], partial(Image.fromarray, pixels), (self.num_read - 1) / 10)

    def close(self) -> None:
        self.closed = True


class Slow(FakeCapture):
    """Takes this many seconds of the clock for every read."""

    def __init__(self, script: Script, clock: Clock, seconds: float) -> None:
        super().__init__(script)
        self.clock, self.seconds = clock, seconds

    def read(self) -> Picture | None:
        self.clock.now += self.seconds
        return super().read()


Camera = Callable[[], FakeCapture]


class FakeCamera:
    """Plays one script per opening; when they are used up, it cannot be opened any more."""

    def __init__(self, *scripts: Script, capture: Callable[[Script], FakeCapture] = FakeCapture) -> None:
        self.captures: list[FakeCapture] = []
        self.num_openings = 0
        self._scripts, self._capture = iter(scripts), capture

    def __call__(self) -> FakeCapture:
        self.num_openings += 1
        self.captures.append(self._capture(next(self._scripts, REFUSED)))
        return self.captures[-1]


def source_of(camera: Camera, clock: Clock | None = None, jitter: float = 1.0, **options: Any) -> LiveSource:
    """Return a live source that waits in fake time if a clock is given, and else hardly at all."""
    live_options = LiveOptions(**{"buffer": "all", "reconnect_for": 1000.0, **options})
    if clock is None:
        return LiveSource(0, live_options, connect=camera, sleep=lambda seconds: time.sleep(0.01))
    return LiveSource(0, live_options, connect=camera, clock=clock, sleep=clock.sleep, jitter=lambda: jitter)


def levels(frames: list[Frame]) -> list[int]:
    return [int(np.asarray(frame.load())[0, 0, 0]) for frame in frames]


def numbers(frames: list[Frame]) -> list[int | None]:
    return [frame.number for frame in frames]


def web(camera: Camera, clock: Clock, *, stride: int = 1, **options: Any) -> LiveSource:
    live_options = LiveOptions(**{"buffer": "all", **options})
    return LiveSource("http://host/live", live_options, stride=stride, connect=camera, clock=clock, sleep=clock.sleep)


def noise(seed: int) -> np.ndarray:
    """Return a random frame in the form of a live source."""
    return np.asarray(draw_image(seed))
