"""A connection to a source that hangs, stalls, or sends data that cannot be decoded."""

from functools import partial
from itertools import islice
from typing import Any

import pytest

from remtta.errors import FrameError, StreamError
from remtta.options import LiveOptions
from remtta.streams import live as live_module
from remtta.streams.frames import Gap
from remtta.streams.live import LiveSource
from tests.streams.fakes import (
    HANGS,
    REFUSED,
    REFUSED_PART,
    UNDECODABLE,
    Clock,
    FakeCamera,
    FakeCapture,
    Script,
    Silent,
    Slow,
    levels,
    numbers,
    released,
    source_of,
    web,
)


def test_a_source_of_nothing_but_undecodable_frames_is_lost() -> None:
    clock = Clock()
    scripts = [10, *[UNDECODABLE] * 99], [*[UNDECODABLE] * 3, 20]
    camera = FakeCamera(*scripts, capture=lambda script: Slow(script, clock, 1))
    frames = list(islice(source_of(camera, clock, read_timeout_s=5).frames(), 8))
    assert [frame.gap is not None for frame in frames] == [False] * 7 + [True]
    assert frames[-1].gap is not None
    assert frames[-1].gap.reason == "no frame that could be decoded within 5 s"
    assert levels(frames[:1]) + levels(frames[-1:]) == [10, 20] and len({*numbers(frames)}) == 8
    for frame in frames[1:-1]:
        with pytest.raises(FrameError):
            frame.load()


def test_a_read_that_hangs_is_abandoned_and_the_source_opened_again() -> None:
    source = source_of(FakeCamera([10, HANGS], [20]), read_timeout_s=0.2)
    frames = list(islice(source.frames(), 2))
    assert levels(frames) == [10, 20]
    gap = frames[1].gap
    assert gap is not None and gap.reason == "no frame within 0.2 s" and 0.2 <= gap.seconds < 5


def test_a_frame_out_of_the_decoder_after_a_timeout_is_the_last_before_a_gap() -> None:
    clock = Clock()

    class Delayed(FakeCapture):
        """FFmpeg's H.264 decoder holds back a frame, and returns it when reading the stream has timed out."""

        def grab(self) -> bool:
            clock.now += 15.0 if self.num_grabbed == 1 else 0.1
            return super().grab()

    captures = iter([Delayed([10, 20, 30]), FakeCapture([40])])
    frames = list(islice(source_of(captures.__next__, clock).frames(), 3))
    assert levels(frames) == [10, 20, 40] and numbers(frames) == [0, 1, 2]
    gap = frames[2].gap
    assert gap and gap.reason == "no frame within 15 s" and gap.seconds > 15


def silent(clock: Clock, *scripts: Script) -> LiveSource:
    return source_of(FakeCamera(*scripts, capture=partial(Silent, clock=clock)), clock)


def test_a_read_that_took_ffmpegs_whole_timeout_is_reported_as_a_stall() -> None:
    frames = list(islice(silent(Clock(), [10], [20]).frames(), 2))
    assert frames[1].gap == Gap(15.51, "no frame within 15 s", 1)


@pytest.mark.parametrize(("script", "what"), [(REFUSED, "answer"), ([], "frame")])
def test_a_server_that_is_silent_from_the_start_is_reported_as_one(script: Script, what: str) -> None:
    with pytest.raises(StreamError, match=rf"^camera 0: no {what} within 15 s; check the camera or the network$"):
        next(silent(Clock(), script).frames())


def test_the_timeouts_of_the_options_are_passed_to_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[tuple[float, ...]] = []

    def opened(source: str, *seconds: float) -> FakeCapture:
        timeouts.append(seconds)
        return FakeCapture([10])

    monkeypatch.setattr(live_module, "open_capture", opened)
    frames = LiveSource(0, LiveOptions(open_timeout_s=3, read_timeout_s=4)).frames()
    next(frames)
    frames.close()
    assert timeouts == [(3, 4)]


def test_a_first_opening_that_hangs_is_an_error() -> None:
    def connect() -> FakeCapture:
        released.wait(20)
        return FakeCapture(REFUSED)

    with pytest.raises(StreamError, match=r"^camera 0: no answer within 0\.2 s; check the camera or the network$"):
        next(source_of(connect, open_timeout_s=0.2).frames())


def test_what_opencv_raises_is_a_loss_like_any_other() -> None:
    class Broken(FakeCapture):
        def retrieve(self) -> tuple[bool, Any]:
            if self.step == 20:
                raise RuntimeError("(-215:Assertion failed)\n in function 'read'")
            return super().retrieve()

    captures = iter([Broken([10, 20]), FakeCapture([30])])
    frames = list(islice(source_of(captures.__next__).frames(), 2))
    assert levels(frames) == [10, 30]
    assert frames[1].gap and frames[1].gap.reason == "(-215:Assertion failed) in function 'read'"


@pytest.mark.parametrize("stride", [1, 2])
def test_parts_that_the_decoder_refuses_are_undecodable_frames_of_a_stream_that_continues(stride: int) -> None:
    camera = FakeCamera([0, REFUSED_PART, REFUSED_PART, 30, 40], [50])
    frames = list(islice(web(camera, Clock(), stride=stride).frames(), 6 // stride))
    assert numbers(frames) == [0, 1, 2, 3, 4, 5][::stride]
    assert [frame.gap is not None for frame in frames] == [number == 5 for number in numbers(frames)]
    for frame in frames:
        if frame.number in (1, 2):
            with pytest.raises(FrameError, match=r"^cannot be decoded$"):
                frame.load()
        else:
            assert frame.number is not None and levels([frame]) == [10 * frame.number]


def test_nothing_but_refused_parts_is_a_loss() -> None:
    clock = Clock()
    captures = iter(
        [Slow([10, *[REFUSED_PART] * 20], clock, 1), FakeCapture([20, *[REFUSED_PART] * 40, 30]), FakeCapture([40])]
    )
    frames = list(islice(web(captures.__next__, clock, read_timeout_s=5).frames(), 3))
    assert levels(frames) == [10, 20, 40] and numbers(frames) == [0, 1, 2]
    reasons = [frame.gap and frame.gap.reason for frame in frames]
    assert reasons == [None, "no frame that could be decoded within 5 s", "the connection ended"]
