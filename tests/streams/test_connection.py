"""A connection to a source that hangs, stalls, or sends data that cannot be decoded."""

from itertools import islice

import pytest

from remtta.errors import FrameError, StreamError
from remtta.streams.frames import Picture
from tests.streams.fakes import (
    HANGS,
    UNDECODABLE,
    Clock,
    FakeCamera,
    FakeCapture,
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
    frames = list(islice(source_of(camera, clock, read_timeout_s=5).frames(), 7))
    assert [frame.gap is not None for frame in frames] == [False] * 6 + [True]
    assert frames[-1].gap is not None
    assert frames[-1].gap.reason == "no frame that could be decoded within 5 s"
    assert levels(frames[:1]) + levels(frames[-1:]) == [10, 20] and len({*numbers(frames)}) == 7
    for frame in frames[1:-1]:
        with pytest.raises(FrameError):
            frame.load()


def test_a_read_that_hangs_is_abandoned_and_the_source_opened_again() -> None:
    source = source_of(FakeCamera([10, HANGS], [20]), read_timeout_s=0.2)
    frames = list(islice(source.frames(), 2))
    assert levels(frames) == [10, 20]
    gap = frames[1].gap
    assert gap is not None and gap.reason == "no frame within 0.2 s" and 0.2 <= gap.seconds < 5


def test_frames_out_of_the_decoder_after_a_timeout_are_the_last_before_a_gap() -> None:
    clock = Clock()

    class Delayed(FakeCapture):
        """FFmpeg's H.264 decoder holds back frames, and returns them when reading the stream has timed out."""

        def read(self) -> Picture | None:
            clock.now += 15.0 if self.num_read == 1 else 0.1
            return super().read()

    captures = iter([Delayed([10, 20, 30, TimeoutError("no frame within 15 s")]), FakeCapture([40])])
    frames = list(islice(source_of(captures.__next__, clock).frames(), 4))
    assert levels(frames) == [10, 20, 30, 40] and numbers(frames) == [0, 1, 2, 3]
    gap = frames[3].gap
    assert gap and gap.reason == "no frame within 15 s" and gap.seconds > 15


def test_a_first_opening_that_hangs_is_an_error() -> None:
    def connect() -> FakeCapture:
        released.wait(20)
        return FakeCapture([])

    with pytest.raises(StreamError, match=r"^camera 0: no answer within 0\.2 s; check the camera or the network$"):
        next(source_of(connect, open_timeout_s=0.2).frames())


def test_what_a_library_raises_is_a_loss_like_any_other() -> None:
    error = RuntimeError("(-215:Assertion failed)\n in function 'read'")
    frames = list(islice(source_of(FakeCamera([10, error], [30])).frames(), 2))
    assert levels(frames) == [10, 30]
    assert frames[1].gap and frames[1].gap.reason == "(-215:Assertion failed) in function 'read'"


@pytest.mark.parametrize("stride", [1, 2])
def test_frames_that_cannot_be_decoded_are_rows_of_a_stream_that_continues(stride: int) -> None:
    camera = FakeCamera([0, UNDECODABLE, UNDECODABLE, 30, 40], [50])
    frames = list(islice(web(camera, Clock(), stride=stride).frames(), 6 // stride))
    assert numbers(frames) == [0, 1, 2, 3, 4, 5][::stride]
    assert [frame.gap is not None for frame in frames] == [number == 5 for number in numbers(frames)]
    for frame in frames:
        if frame.number in (1, 2):
            with pytest.raises(FrameError, match=r"^cannot be decoded$"):
                frame.load()
        else:
            assert frame.number is not None and levels([frame]) == [10 * frame.number]
