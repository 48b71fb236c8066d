"""Cameras and network streams that get lost, hang, come back changed, or are faster than the model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from remtta.errors import FrameError, StreamError, UsageError
from remtta.streams import live as live_module
from remtta.streams import open_stream
from remtta.streams.frames import Frame, Gap
from remtta.streams.live import LiveOptions, LiveSource

UNDECODABLE, HANGS, GATE = "undecodable", "hangs", "gate"
REFUSED = None
Script = list[Any] | None

_released = threading.Event()


@pytest.fixture(autouse=True)
def _hanging_reads_return_and_no_thread_is_left() -> Iterator[None]:
    _released.clear()
    before = set(threading.enumerate())
    yield
    _released.set()
    assert happens(lambda: set(threading.enumerate()) <= before)


def happens(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class Clock:
    """Time that passes only while something sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


class FakeCapture:
    """Plays a script: grey levels or pixels are frames, and its end is the end of the connection."""

    def __init__(self, script: Script, promised: int = 0) -> None:
        self.steps = iter(script or [])
        self.opened, self.promised = script is not None, promised
        self.num_grabbed = 0
        self.released = False
        self.gate = threading.Event()
        self.step: Any = None

    def isOpened(self) -> bool:
        return self.opened

    def grab(self) -> bool:
        self.step = next(self.steps, None)
        if self.step is GATE:
            self.gate.wait(20)
            self.step = next(self.steps)
        if self.step is HANGS:
            _released.wait(20)
            return False
        self.num_grabbed += self.step is not None
        return self.step is not None

    def retrieve(self) -> tuple[bool, Any]:
        if isinstance(self.step, str):
            return False, None
        return True, self.step if isinstance(self.step, np.ndarray) else np.full((36, 40, 3), self.step, np.uint8)

    def get(self, prop: int, /) -> float:
        return float(self.promised)

    def release(self) -> None:
        self.released = True


class FakeCamera:
    """One script per opening; once they are used up, it cannot be opened any more."""

    def __init__(self, *scripts: Script, promised: int = 0) -> None:
        self.captures: list[FakeCapture] = []
        self._scripts, self._promised = iter(scripts), promised

    def __call__(self) -> FakeCapture:
        self.captures.append(FakeCapture(next(self._scripts, REFUSED), self._promised))
        return self.captures[-1]


def source_of(camera: FakeCamera, clock: Clock | None = None, jitter: float = 1.0, **options: Any) -> LiveSource:
    """A live source that waits in fake time, unless no clock is given."""
    given = LiveOptions(**{"buffer": "all", "reconnect_for": 1000.0, **options})
    if clock is None:
        return LiveSource(0, given, connect=camera, sleep=lambda seconds: time.sleep(0.01))
    return LiveSource(0, given, connect=camera, clock=clock, sleep=clock.sleep, jitter=lambda: jitter)


def levels(frames: list[Frame]) -> list[int]:
    return [int(np.asarray(frame.load())[0, 0, 0]) for frame in frames]


def numbers(frames: list[Frame]) -> list[int | None]:
    return [frame.number for frame in frames]


def test_a_lost_source_comes_back_and_its_first_frame_tells_the_gap() -> None:
    clock = Clock()
    camera = FakeCamera([10, 20], [30, 40])
    frames = list(islice(source_of(camera, clock).frames(), 4))
    assert levels(frames) == [10, 20, 30, 40]
    assert numbers(frames) == [0, 1, 2, 3]
    assert [frame.time_s for frame in frames] == [0.0, 0.0, 0.5, 0.5]
    assert [frame.gap for frame in frames] == [None, None, Gap(0.5, "the connection ended", 1), None]
    assert [capture.released for capture in camera.captures] == [True, True]


@pytest.mark.parametrize(
    ("jitter", "delays"),
    [(1.0, [0.5, 1, 2, 4, 8, 16, 30, 30, 30]), (0.0, [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15])],
)
def test_it_is_asked_ever_more_seldom_and_anew_after_every_loss(jitter: float, delays: list[float]) -> None:
    clock = Clock()
    camera = FakeCamera([10], *[REFUSED] * 8, [20], [30])
    frames = list(islice(source_of(camera, clock, jitter).frames(), 3))
    assert clock.sleeps == [*delays, delays[0]]
    assert [frame.gap for frame in frames[1:]] == [
        Gap(sum(delays), "the connection ended", 9),
        Gap(delays[0], "the connection ended", 1),
    ]


def test_after_the_patience_is_used_up_the_loss_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    frames = source_of(FakeCamera([10, 20]), clock, reconnect_for=10).frames()
    assert levels(list(islice(frames, 2))) == [10, 20]
    with pytest.raises(
        StreamError, match=r"^camera 0 was lost \(the connection ended\) and did not come back within 10"
    ):
        next(frames)
    assert clock.sleeps == [0.5, 1, 2, 4, 2.5]  # to the second
    assert caplog.messages == ["camera 0 is lost (the connection ended); trying to get it back for 10 s"]


def test_without_patience_the_first_loss_is_the_end() -> None:
    camera = FakeCamera([10, 20], [30])
    assert levels(list(source_of(camera, Clock(), reconnect_for=0).frames())) == [10, 20]
    assert len(camera.captures) == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (REFUSED, r"^camera 0 cannot be opened; check that it is connected and not in use$"),
        ([], r"^camera 0: no frame could be decoded; check that it is a video$"),
    ],
)
def test_a_source_that_never_gave_a_frame_fails_at_once(script: Script, told: str) -> None:
    clock, camera = Clock(), FakeCamera(script, [10])
    with pytest.raises(StreamError, match=told):
        next(source_of(camera, clock).frames())
    assert clock.sleeps == [] and len(camera.captures) == 1


def test_a_read_that_hangs_is_given_up_and_the_source_opened_anew() -> None:
    source = source_of(FakeCamera([10, HANGS], [20]), read_timeout_s=0.2)
    frames = list(islice(source.frames(), 2))
    assert levels(frames) == [10, 20]
    gap = frames[1].gap
    assert gap is not None and gap.reason == "no frame within 0.2 s" and 0.2 <= gap.seconds < 5


def test_a_first_opening_that_hangs_is_an_error() -> None:
    def connect() -> FakeCapture:
        _released.wait(20)
        return FakeCapture(REFUSED)

    source = LiveSource(0, LiveOptions(open_timeout_s=0.2), connect=connect)
    with pytest.raises(StreamError, match=r"^camera 0: no answer within 0\.2 s; check the camera or the network$"):
        next(source.frames())


def test_what_opencv_raises_is_a_loss_like_any_other() -> None:
    class Broken(FakeCapture):
        def retrieve(self) -> tuple[bool, Any]:
            if self.step == 20:
                raise RuntimeError("(-215:Assertion failed)\n in function 'read'")
            return super().retrieve()

    captures = iter([Broken([10, 20]), FakeCapture([30])])
    options = LiveOptions(buffer="all")
    source = LiveSource(0, options, connect=lambda: next(captures), sleep=lambda seconds: None)
    frames = list(islice(source.frames(), 2))
    assert levels(frames) == [10, 30]
    assert frames[1].gap and frames[1].gap.reason == "(-215:Assertion failed) in function 'read'"


def test_frames_of_another_size_after_a_reconnect_are_frames_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    camera = FakeCamera([10], [np.full((20, 30, 3), 200, np.uint8)])
    frames = list(islice(source_of(camera, Clock()).frames(), 2))
    assert [frame.load().size for frame in frames] == [(40, 36), (30, 20)]
    assert caplog.messages[-1] == "camera 0 now gives frames of 30 x 20 pixels"


def test_a_frame_that_cannot_be_decoded_stands_in_its_place() -> None:
    frames = list(islice(source_of(FakeCamera([10, UNDECODABLE, 30]), Clock()).frames(), 3))
    assert numbers(frames) == [0, 1, 2]
    with pytest.raises(FrameError, match=r"^cannot be decoded$"):
        frames[1].load()
    assert levels([frames[0], frames[2]]) == [10, 30]


@pytest.mark.parametrize("buffer", ["latest", "all"])
def test_a_finite_video_behind_an_address_is_read_whole_and_once(buffer: str) -> None:
    camera = FakeCamera([10, 20, 30], [40], promised=3)
    source = source_of(camera, Clock(), buffer=buffer)
    assert levels(list(source.frames())) == [10, 20, 30]
    assert len(camera.captures) == 1 and source.dropped == 0


@pytest.mark.parametrize(("keep", "newest"), [(1, [50]), (3, [30, 40, 50])])
def test_latest_keeps_the_newest_frames_for_the_model_and_counts_the_others(keep: int, newest: list[int]) -> None:
    camera = FakeCamera([0, GATE, 10, 20, 30, 40, 50, HANGS])
    source = source_of(camera, buffer="latest")
    source.keep = keep
    frames = source.frames()
    assert levels([next(frames)]) == [0]
    [capture] = camera.captures
    capture.gate.set()
    assert happens(lambda: capture.step is HANGS)  # all have arrived
    rest = list(islice(frames, len(newest)))
    assert levels(rest) == newest
    assert numbers(rest) == [level // 10 for level in newest]
    assert source.dropped == 5 - len(newest)
    _released.set()
    frames.close()


def test_all_has_the_source_wait_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MOST_WAITING", 3)
    camera = FakeCamera(list(range(20)))
    source = source_of(camera, read_timeout_s=0.2, reconnect_for=0)
    frames = source.frames()
    first = next(frames)
    time.sleep(0.5)  # longer than a read may take: waiting for the model is no hanging
    assert camera.captures[0].num_grabbed == 1 + 3 + 1  # taken, waiting, and the one in the reader's hand
    assert levels([first, *frames]) == list(range(20))
    assert source.dropped == 0


def test_frames_that_are_large_wait_in_smaller_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "MOST_WAITING_BYTES", 2 * 36 * 40 * 3)
    camera = FakeCamera(list(range(20)))
    frames = source_of(camera, reconnect_for=0).frames()
    next(frames)
    time.sleep(0.2)
    assert camera.captures[0].num_grabbed == 1 + 2 + 1
    frames.close()


def test_closing_ends_the_reading_from_another_thread_also_while_reconnecting() -> None:
    source = LiveSource(0, LiveOptions(buffer="all"), connect=FakeCamera([10]))  # real time: half a minute to wait
    threading.Timer(0.3, source.close).start()
    began = time.monotonic()
    assert levels(list(source.frames())) == [10]
    assert source.state == "reconnecting" and time.monotonic() - began < 1.5


def test_every_kth_frame_is_taken_across_a_loss() -> None:
    clock = Clock()
    options = LiveOptions(buffer="all")
    source = LiveSource(0, options, stride=2, connect=FakeCamera([0, 1, 2], [3, 4, 5]), clock=clock, sleep=clock.sleep)
    frames = list(islice(source.frames(), 3))
    assert numbers(frames) == levels(frames) == [0, 2, 4]
    assert frames[2].gap is not None


@pytest.mark.parametrize("options", [{"reconnect_for": 5}, {"buffer": "latest"}])
def test_a_source_that_is_not_live_is_neither_reconnected_to_nor_buffered(options: Any, frames: Any) -> None:
    option = "--reconnect-for" if "reconnect_for" in options else "--buffer"
    with pytest.raises(UsageError, match=f"^{option} is for cameras and network streams, and .*frames is none"):
        open_stream(frames, **options)


@pytest.mark.parametrize("options", [{"reconnect_for": -1}, {"reconnect_for": float("inf")}, {"buffer": "some"}])
def test_impossible_options_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="must be"):
        open_stream("0", **options)
