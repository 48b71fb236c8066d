"""Cameras and network streams that get lost, and what is done to get them back."""

import time
from functools import partial
from itertools import islice
from typing import Any

import pytest

from remtta.errors import StreamError, UsageError
from remtta.streams import connection as connection_module
from remtta.streams.frames import Gap
from remtta.streams.sources import open_stream
from tests.conftest import happens
from tests.streams.fakes import (
    GATE,
    HANGS,
    REFUSED,
    UNDECODABLE,
    Clock,
    FakeCamera,
    FakeCapture,
    Script,
    Slow,
    levels,
    numbers,
    released,
    source_of,
    web,
)


def test_the_first_frame_of_a_source_that_comes_back_holds_the_gap() -> None:
    clock = Clock()
    camera = FakeCamera([10, 20], [30, 40])
    frames = list(islice(source_of(camera, clock).frames(), 4))
    assert levels(frames) == [10, 20, 30, 40]
    assert numbers(frames) == [0, 1, 2, 3]
    assert [frame.time_s for frame in frames] == [0.0, 0.0, 0.5, 0.5]
    assert [frame.gap for frame in frames] == [None, None, Gap(0.5, "the connection ended", 1), None]
    assert [capture.closed for capture in camera.captures] == [True, True]


@pytest.mark.parametrize(
    ("jitter", "delays"), [(1.0, [0.5, 1, 2, 4, 8, 16, 30, 30, 30]), (0.0, [0.25, 0.5, 1, 2, 4, 8, 15, 15, 15])]
)
def test_attempts_become_rarer_and_start_anew_after_every_loss(jitter: float, delays: list[float]) -> None:
    clock = Clock()
    camera = FakeCamera([10], *[REFUSED] * 8, [20], [30])
    frames = list(islice(source_of(camera, clock, jitter).frames(), 3))
    assert clock.sleeps == [*delays, delays[0]]
    assert [frame.gap for frame in frames[1:]] == [
        Gap(sum(delays), "the connection ended", 9),
        Gap(delays[0], "the connection ended", 1),
    ]


def test_a_loss_of_longer_than_reconnect_for_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    frames = source_of(FakeCamera([10, 20]), clock, reconnect_for=10).frames()
    assert levels(list(islice(frames, 2))) == [10, 20]
    with pytest.raises(
        StreamError, match=r"^camera 0 was lost \(the connection ended\) and could not be opened within 10"
    ):
        next(frames)
    assert clock.sleeps == [0.5, 1, 2, 4, 2.5]  # to the second
    assert caplog.messages == ["camera 0 is lost (the connection ended); retrying for 10 s"]


def test_without_reconnection_a_stall_is_an_error_and_a_hang_up_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    message = r"^http://host/live was lost \(no frame within 15 s\); check it and the network, or wait for it with"
    with pytest.raises(StreamError, match=message):
        list(web(FakeCamera([10, TimeoutError("no frame within 15 s")]), Clock(), reconnect_for=0).frames())
    camera = FakeCamera([10, 20], [30])
    assert levels(list(web(camera, Clock(), reconnect_for=0).frames())) == [10, 20] and len(camera.captures) == 1
    assert caplog.messages == ["http://host/live has ended (the connection ended) and is not reopened"]


def test_a_source_that_is_missing_at_the_start_is_waited_for_with_wait_at_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    camera = FakeCamera(REFUSED, REFUSED, [10, 20])
    frames = source_of(camera, clock, wait_at_start=True).frames()
    first = list(islice(frames, 2))
    assert levels(first) == [10, 20] and [frame.gap for frame in first] == [None, None]
    assert clock.sleeps == [0.5, 1]
    assert caplog.messages == [
        "camera 0 is not available (it cannot be opened); retrying for 1000 s",
        "camera 0 is available now",
    ]


@pytest.mark.parametrize(
    ("script", "promised", "patience_s", "message"),
    [
        (REFUSED, 0, None, r"^camera 0 cannot be opened; check that it is connected and not in use$"),
        ([], 0, None, r"^camera 0: no frame could be decoded; check that it is a whole video$"),
        ([], 7, 3, "no frame could be decoded"),  # a finite video is not waited for
        (REFUSED, 0, 3, r"^camera 0 was not available \(it cannot be opened\) and could not be opened within 3 s"),
    ],
)
def test_a_source_that_never_gave_a_frame_is_an_error(
    script: Script, promised: int, patience_s: float | None, message: str
) -> None:
    clock, camera = Clock(), FakeCamera(script, capture=partial(FakeCapture, promised=promised))
    waits: Any = {"wait_at_start": True, "reconnect_for": patience_s} if patience_s else {}
    with pytest.raises(StreamError, match=message):
        next(source_of(camera, clock, **waits).frames())
    assert clock.now == (3 if "available" in message else 0) and (clock.now or camera.num_openings == 1)


@pytest.mark.parametrize("buffer", ["latest", "all"])
def test_a_finite_video_behind_an_address_is_read_whole_and_once(buffer: str) -> None:
    camera = FakeCamera([10, 20, 30], [40], capture=partial(FakeCapture, promised=3))
    source = source_of(camera, Clock(), buffer=buffer)
    assert levels(list(source.frames())) == [10, 20, 30]
    assert len(camera.captures) == 1 and source.backlog.dropped == 0


def test_a_live_stream_that_has_become_a_finite_video_has_ended() -> None:
    camera = FakeCamera([10, 20], [10, 20], capture=lambda script: FakeCapture(script, 2 * len(camera.captures)))
    assert levels(list(source_of(camera, Clock()).frames())) == [10, 20]


def test_a_finite_video_that_hangs_halfway_is_an_error() -> None:
    camera = FakeCamera([10, 20, HANGS], capture=partial(FakeCapture, promised=9))
    with pytest.raises(StreamError, match=r"lost after 2 of 9 frames \(no frame within 0.2 s\); check it and"):
        list(source_of(camera, read_timeout_s=0.2).frames())


def test_a_single_frame_that_cannot_be_decoded_is_no_reason_to_reconnect() -> None:
    clock = Clock()
    camera = FakeCamera([10] * 20 + [UNDECODABLE] + [10] * 20, capture=lambda script: Slow(script, clock, 1))
    frames = list(islice(web(camera, clock, stride=20).frames(), 3))  # 20 s between those that are decoded
    assert [frame.gap for frame in frames] == [None] * 3 and len(camera.captures) == 1


@pytest.mark.parametrize("options", [{"reconnect_for": 5}, {"buffer": "latest"}])
def test_a_source_that_is_not_live_is_neither_reconnected_to_nor_buffered(options: Any, frames: Any) -> None:
    option = "--reconnect-for" if "reconnect_for" in options else "--buffer"
    with pytest.raises(UsageError, match=f"{option}.* for cameras and network streams, and .*frames is neither"):
        open_stream(frames, **options)


@pytest.mark.parametrize("options", [{"reconnect_for": -1}, {"reconnect_for": float("inf")}, {"buffer": "some"}])
def test_impossible_options_are_refused(options: Any) -> None:
    with pytest.raises(UsageError, match="must be"):
        open_stream("0", **options)


@pytest.mark.parametrize(("keep", "newest"), [(1, [50]), (3, [30, 40, 50])])
def test_buffer_latest_keeps_the_newest_frames_and_counts_the_others(keep: int, newest: list[int]) -> None:
    camera = FakeCamera([0, GATE, 10, 20, 30, 40, 50, HANGS])
    source = source_of(camera, buffer="latest")
    source.backlog.keep = keep
    frames = source.frames()
    assert levels([next(frames)]) == [0]
    [capture] = camera.captures
    capture.gate.set()
    assert happens(lambda: capture.step is HANGS)  # all have arrived
    rest = list(islice(frames, len(newest)))
    assert levels(rest) == newest
    assert numbers(rest) == [level // 10 for level in newest]
    assert source.backlog.dropped == 5 - len(newest)
    released.set()
    frames.close()


@pytest.mark.parametrize(("limit", "value", "waiting"), [("WAITING", 3, 3), ("WAITING_BYTES", 2 * 36 * 40 * 3, 2)])
def test_buffer_all_makes_the_source_wait_and_loses_no_frame(
    limit: str, value: int, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, f"MAX_{limit}", value)
    camera = FakeCamera(list(range(20)))
    source = source_of(camera, read_timeout_s=0.1, reconnect_for=0)
    frames = source.frames()
    first = next(frames)
    time.sleep(0.25)  # longer than a read may take: waiting for the model is no hanging
    assert camera.captures[0].num_read == 1 + waiting + 1  # taken, waiting, and the one in the reader's hand
    assert levels([first, *frames]) == list(range(20))
    assert source.backlog.dropped == 0
