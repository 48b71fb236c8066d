"""Cameras and network streams that get lost, hang, come back changed, or are faster than the model."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from remtta import REM, REMConfig, RunOptions, adapt_stream, load_delta
from remtta.errors import FrameError, StreamError, UsageError
from remtta.guard.guard import Guard
from remtta.models.preprocessing import preprocessing_of
from remtta.options import GuardOptions
from remtta.runs.adapt import RunSummary
from remtta.runs.folder import EVENTS, PREDICTIONS, RECORD, STATE
from remtta.runs.inspection import describe_run
from remtta.runs.interrupts import Interrupts
from remtta.runs.place import load_place
from remtta.streams import live as live_module
from remtta.streams.frames import Frame, Gap
from remtta.streams.live import LiveOptions, LiveSource
from remtta.streams.sources import Stream, open_stream
from tests.cli.test_commands import remtta_here
from tests.conftest import TINY_OPTIONS, draw_image, random_images, tiny_vit

UNDECODABLE, REFUSED_PART, HANGS, GATE = "undecodable", "refused part", "hangs", "gate"
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
        grabbed = self.step is not None and self.step is not REFUSED_PART
        self.num_grabbed += grabbed
        return grabbed

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


def test_without_patience_a_stall_is_an_error_and_a_hang_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = r"^http://host/live was lost \(no frame within 15 s\); check it and the network, or have it waited for with"
    clock = Clock()
    source = LiveSource(
        "http://host/live", LiveOptions(buffer="all", reconnect_for=0), connect=lambda: Silent([10], clock), clock=clock
    )
    with pytest.raises(StreamError, match=told):
        list(source.frames())
    assert levels(list(web(FakeCamera([10]), Clock(), reconnect_for=0).frames())) == [10]
    assert caplog.messages == ["http://host/live is at its end (the connection ended), and is not to be opened again"]


def test_a_source_that_is_not_there_at_the_start_is_waited_for_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    camera = FakeCamera(REFUSED, REFUSED, [10, 20])
    frames = source_of(camera, clock, wait_at_start=True).frames()
    first = list(islice(frames, 2))
    assert levels(first) == [10, 20] and [frame.gap for frame in first] == [None, None]
    assert clock.sleeps == [0.5, 1]
    assert caplog.messages == [
        "camera 0 is not there (it cannot be opened); trying to get it for 1000 s",
        "camera 0 is there now",
    ]


def test_a_source_that_does_not_come_in_time_was_not_there() -> None:
    clock = Clock()
    with pytest.raises(
        StreamError, match=r"^camera 0 was not there \(it cannot be opened\) and did not come within 3 s"
    ):
        next(source_of(FakeCamera(), clock, wait_at_start=True, reconnect_for=3).frames())
    assert clock.now == 3


def test_a_finite_video_that_cannot_be_read_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(StreamError, match="no frame could be decoded"):
        next(source_of(FakeCamera([], promised=7), clock, wait_at_start=True).frames())
    assert not clock.sleeps


def test_a_source_of_nothing_but_undecodable_frames_is_lost() -> None:
    class Noise(FakeCapture):
        """Each frame takes a second of the clock."""

        def grab(self) -> bool:
            clock.now += 1
            return super().grab()

    class NoisyCamera(FakeCamera):
        def __call__(self) -> FakeCapture:
            self.captures.append(Noise(next(self._scripts, REFUSED)))
            return self.captures[-1]

    clock = Clock()
    camera = NoisyCamera([10, *[UNDECODABLE] * 99], [*[UNDECODABLE] * 3, 20])
    frames = list(islice(source_of(camera, clock, read_timeout_s=5).frames(), 7))
    assert [frame.gap is not None for frame in frames] == [False] * 6 + [True]
    assert frames[-1].gap is not None
    assert frames[-1].gap.reason == "no frame that could be decoded within 5 s"
    assert levels(frames[:1]) + levels(frames[-1:]) == [10, 20]
    for frame in frames[1:-1]:
        with pytest.raises(FrameError):
            frame.load()


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


def test_a_frame_out_of_the_decoder_after_a_timeout_is_the_last_before_a_gap() -> None:
    clock = Clock()

    class Delayed(FakeCapture):
        """FFmpeg's H.264 decoder holds a frame back, and gives it out when reading the stream has timed out."""

        def grab(self) -> bool:
            clock.now += 15.0 if self.num_grabbed == 1 else 0.1
            return super().grab()

    captures = iter([Delayed([10, 20, 30]), FakeCapture([40])])
    source = LiveSource(
        0, LiveOptions(buffer="all"), connect=lambda: next(captures), clock=clock, sleep=clock.sleep, jitter=lambda: 1.0
    )
    frames = list(islice(source.frames(), 3))
    assert levels(frames) == [10, 20, 40] and numbers(frames) == [0, 1, 2]
    gap = frames[2].gap
    assert gap and gap.reason == "no frame within 15 s" and gap.seconds > 15


class Silent(FakeCapture):
    """Gives up after FFmpeg's whole timeout."""

    def __init__(self, script: Script, clock: Clock) -> None:
        super().__init__(script)
        self.clock = clock

    def isOpened(self) -> bool:
        self.clock.now += 0 if self.opened else 15.01
        return self.opened

    def grab(self) -> bool:
        grabbed = super().grab()
        self.clock.now += 0 if grabbed else 15.01
        return grabbed


def silent(clock: Clock, *scripts: Script) -> LiveSource:
    captures = iter([Silent(script, clock) for script in scripts])
    options = LiveOptions(buffer="all")
    return LiveSource(0, options, connect=lambda: next(captures), clock=clock, sleep=clock.sleep, jitter=lambda: 1.0)


def test_a_read_that_took_ffmpegs_whole_timeout_is_told_as_a_stall() -> None:
    frames = list(islice(silent(Clock(), [10], [20]).frames(), 2))
    assert frames[1].gap == Gap(15.51, "no frame within 15 s", 1)


@pytest.mark.parametrize(("script", "what"), [(REFUSED, "answer"), ([], "frame")])
def test_a_server_that_is_silent_from_the_start_is_told_as_one(script: Script, what: str) -> None:
    with pytest.raises(StreamError, match=rf"^camera 0: no {what} within 15 s; check the camera or the network$"):
        next(silent(Clock(), script).frames())


def test_the_timeouts_of_the_record_are_ffmpegs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[float, ...]] = []

    def opened(cv2: Any, source: str, *seconds: float) -> FakeCapture:
        given.append(seconds)
        return FakeCapture([10])

    monkeypatch.setattr(live_module, "open_capture", opened)
    frames = LiveSource(0, LiveOptions(open_timeout_s=3, read_timeout_s=4)).frames()
    next(frames)
    frames.close()
    assert given == [(3, 4)]


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


def web(camera: FakeCamera, clock: Clock, *, stride: int = 1, **options: Any) -> LiveSource:
    given = LiveOptions(**{"buffer": "all", **options})
    return LiveSource("http://host/live", given, stride=stride, connect=camera, clock=clock, sleep=clock.sleep)


@pytest.mark.parametrize("stride", [1, 2])
def test_parts_that_the_decoder_refuses_are_undecodable_frames_of_a_stream_that_goes_on(stride: int) -> None:
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
    class Slow(FakeCapture):
        def grab(self) -> bool:
            clock.now += 1
            return super().grab()

    clock = Clock()
    captures = iter([Slow([10, *[REFUSED_PART] * 20]), FakeCapture([20, *[REFUSED_PART] * 40, 30]), FakeCapture([40])])
    options = LiveOptions(buffer="all", read_timeout_s=5)
    source = LiveSource("http://host/", options, connect=lambda: next(captures), clock=clock, sleep=clock.sleep)
    frames = list(islice(source.frames(), 3))
    assert levels(frames) == [10, 20, 40] and numbers(frames) == [0, 1, 2]
    reasons = [frame.gap and frame.gap.reason for frame in frames]
    assert reasons == [None, "no frame that could be decoded within 5 s", "the connection ended"]


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


# Runs over live sources


def noise(seed: int) -> np.ndarray:
    """A frame as a live source gives it."""
    return np.asarray(draw_image(seed))


def cam(*scripts: Script, limit: int | None = None, **options: Any) -> Stream:
    """A stream of a fake camera that ends with its last script."""
    source = source_of(FakeCamera(*scripts), Clock(), reconnect_for=60, **options)
    return Stream("0", "camera", islice(source.frames(), limit), live_source=source)


def go(stream: Stream, folder: Path, method: str = "rem", **more: Any) -> RunSummary:
    options = RunOptions(**{"batch_size": 3, "save_every": 2, "logits": True, **more.pop("options", {})})
    config = REMConfig(lr=0.01) if method == "rem" else None
    return adapt_stream(tiny_vit(), stream, folder, method=method, config=config, options=options, **more)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def counts_of(folder: Path) -> dict[str, Any]:
    counts: dict[str, Any] = json.loads((folder / RECORD).read_text())["counts"]
    return counts


GAP = {"source": "camera 0", "seconds": 0.5, "reason": "the connection ended", "attempts": 1}


def test_a_gap_is_a_line_at_its_place_in_the_predictions_and_in_the_events(tmp_path: Path) -> None:
    stream = cam([noise(0), noise(1)], [noise(2), UNDECODABLE, noise(3)], limit=5)
    summary = go(stream, tmp_path, options={"guard": None})
    rows = lines_of(tmp_path / PREDICTIONS)
    assert rows[2] == {"gap": True, **GAP, "time": rows[3]["time"]}
    assert [row["index"] for row in rows if "gap" not in row] == [0, 1, 2, 3, 4]
    assert [row.get("error") for row in rows] == [None, None, None, None, "cannot be decoded", None]
    assert [row["adapted"] for row in rows if "class" in row] == [True] * 4
    [event] = lines_of(tmp_path / EVENTS)
    assert {"frame": 2, "event": "gap", **GAP}.items() <= event.items() and "time" in event
    assert (summary.num_frames, summary.num_skipped, summary.num_updates) == (5, 1, 2)
    assert counts_of(tmp_path)["gaps"] == 1 and counts_of(tmp_path)["dropped"] == 0
    told = describe_run(tmp_path)["predictions"]
    assert (told["predicted"], told["errors"], told["gaps"]) == (4, 1, 1)


def test_frames_do_not_wait_for_the_end_of_a_gap_to_be_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remtta.streams.batches.LOST_S", 0.05)
    back, waited = threading.Event(), []
    captures = iter([FakeCapture([noise(0), noise(1)]), FakeCapture([noise(2), noise(3)])])

    def connect() -> FakeCapture:
        if source.state == "reconnecting":
            back.wait(20)
        return next(captures)

    def watch() -> None:
        predictions = tmp_path / PREDICTIONS
        waited.append(happens(lambda: predictions.exists() and len(predictions.read_text().splitlines()) == 2))
        back.set()

    source = LiveSource(0, LiveOptions(buffer="all"), connect=connect, sleep=lambda seconds: time.sleep(0.01))
    watcher = threading.Thread(target=watch)
    watcher.start()
    go(Stream("0", "camera", islice(source.frames(), 4), live_source=source), tmp_path, options={"guard": None})
    watcher.join()
    assert waited == [True]
    rows = [row for row in lines_of(tmp_path / PREDICTIONS) if "gap" not in row]
    assert [(row["index"], row["update"]) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_a_source_that_stays_lost_ends_the_run_with_all_its_frames_predicted(tmp_path: Path) -> None:
    with pytest.raises(StreamError, match="did not come back within 60 s"):
        go(cam([noise(number) for number in range(5)]), tmp_path)
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [(row["index"], row["update"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)]
    assert "did not come back" in json.loads((tmp_path / RECORD).read_text())["exit_reason"]


def test_a_run_goes_on_over_gaps_with_the_right_numbers(tmp_path: Path) -> None:
    go(cam([noise(0)], [noise(1), noise(2)], [noise(3)], limit=4), tmp_path)
    assert load_place(tmp_path / STATE)[0].gaps == 2
    # As a kill before the first save would leave it.
    (tmp_path / STATE).unlink()
    go(cam([noise(4)], [noise(5)], limit=2), tmp_path, options={"resume": True})
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [row.get("index", "gap") for row in rows] == [0, "gap", 1, 2, "gap", 3, 4, "gap", 5]
    assert counts_of(tmp_path)["frames"] == 6 and counts_of(tmp_path)["gaps"] == 3
    events = [(event["frame"], event["event"]) for event in lines_of(tmp_path / EVENTS)]
    assert events == [(1, "gap"), (3, "gap"), (4, "resumed"), (5, "gap")]


def test_rows_of_a_live_source_say_when_the_frame_was_read(tmp_path: Path) -> None:
    began = datetime.now(UTC)
    for resume in (False, True):
        stream = cam([noise(0), UNDECODABLE], [noise(1)], limit=3)
        go(stream, tmp_path, options={"resume": resume})
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [row.get("index", "gap") for row in rows] == [0, 1, "gap", 2, 3, 4, "gap", 5]
    times = [datetime.fromisoformat(row["time"]) for row in rows]
    assert timedelta(0) <= times[0] - began + timedelta(milliseconds=1) and times[-1] <= datetime.now(UTC)
    assert times == sorted(times) and all(re.fullmatch(r".*T.*\.\d{3}\+00:00", row["time"]) for row in rows)


def test_a_frame_out_of_a_decoder_that_gave_up_was_read_when_it_was_asked_for() -> None:
    clock = Clock()

    class Delayed(FakeCapture):
        def grab(self) -> bool:
            clock.now += 15.0
            return super().grab()

    source = LiveSource(0, LiveOptions(buffer="all"), connect=lambda: Delayed([10]), clock=clock, sleep=clock.sleep)
    frames = source.frames()
    read_at = next(frames).read_at
    frames.close()
    assert read_at is not None and 14 < (datetime.now(UTC) - datetime.fromisoformat(read_at)).total_seconds() < 60


def finite(count: int, limit: int | None = None) -> Stream:
    """A stream of a video of so many frames behind an address."""
    source = source_of(FakeCamera([noise(number) for number in range(count)], promised=count), Clock())
    return Stream("http://host/clip.mp4", "url", islice(source.frames(), limit), live_source=source)


def test_a_finite_video_behind_an_address_goes_on_where_it_was(tmp_path: Path) -> None:
    go(finite(9), tmp_path / "whole")
    for limit in (6, None, None):
        summary = go(finite(9, limit), tmp_path / "run", options={"resume": True})
    assert (tmp_path / "run" / PREDICTIONS).read_bytes() == (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert [row["frame"] for row in lines_of(tmp_path / "run" / PREDICTIONS)] == list(range(9))
    assert not any("time" in row for row in lines_of(tmp_path / "run" / PREDICTIONS))
    assert summary.num_frames == 9 and summary.exit_reason == "completed"
    with pytest.raises(UsageError, match=r"clip.mp4 holds 5 frame\(s\), and the run had seen 9"):
        go(finite(5), tmp_path / "run", options={"resume": True})


def test_a_signal_ends_a_run_that_is_reconnecting_within_a_second(tmp_path: Path) -> None:
    source = LiveSource(0, LiveOptions(), connect=FakeCamera([noise(0), noise(1)]))  # real time
    stopped_at = []

    def stop() -> None:
        assert happens(lambda: source.state == "reconnecting")
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with Interrupts() as interrupts:
        stream = Stream("0", "camera", source.frames(), live_source=source)
        summary = go(stream, tmp_path, options={"batch_size": 1}, interrupts=interrupts)
    assert time.monotonic() - stopped_at[0] < 1.5
    assert summary.exit_reason == "SIGTERM"
    assert summary.num_frames + counts_of(tmp_path)["dropped"] == 2


def test_latest_predicts_what_the_camera_shows_now_however_long_the_model_took(tmp_path: Path) -> None:
    class Endless(FakeCapture):
        def grab(self) -> bool:
            time.sleep(0.001)
            self.num_grabbed += 1
            self.step = noise(self.num_grabbed)
            return True

    capture = Endless([])
    source = LiveSource(0, LiveOptions(), connect=lambda: capture)
    shown = []

    def busy(summary: RunSummary) -> None:
        before = capture.num_grabbed
        assert happens(lambda: capture.num_grabbed > before + 30)
        shown.append(capture.num_grabbed)

    stream = Stream("0", "camera", islice(source.frames(), 12), live_source=source)
    go(stream, tmp_path, options={"batch_size": 3}, on_batch=busy)
    frames = [row["frame"] for row in lines_of(tmp_path / PREDICTIONS)]
    assert len(frames) == 12 and frames == sorted(set(frames))
    for batch, now in enumerate(shown[:3], 1):
        assert frames[3 * batch] >= now - 3 - 1  # the batch's own length, and the frame in the reader's hand
    assert counts_of(tmp_path)["dropped"] >= frames[-1] + 1 - 12 > 60


# Frames that are answered, but not learned from


BLACK, DUPLICATE = "black frame", "duplicate of the frame before"


def video(*images: Image.Image | None) -> Stream:
    """A video of these frames; None is a black one."""

    def frames() -> Iterator[Frame]:
        for number, image in enumerate(images):
            shown = image or Image.fromarray(np.random.default_rng(number).integers(0, 3, (36, 40, 3), dtype=np.uint8))
            yield Frame("clip.mp4", lambda shown=shown: shown, number, 0.1 * number)  # type: ignore[misc]

    return Stream("clip.mp4", "video", frames())


a, b, c, d, e = (draw_image(seed) for seed in range(5))


@pytest.mark.parametrize("guard", [None, GuardOptions()])
def test_black_and_repeated_frames_are_predicted_but_change_no_weights(
    guard: GuardOptions | None, tmp_path: Path
) -> None:
    go(video(a, None, None, b, b, c, c, c, d), tmp_path / "run", options={"batch_size": 4, "guard": guard})
    rows = lines_of(tmp_path / "run" / PREDICTIONS)
    reasons = [None, BLACK, BLACK, None, DUPLICATE, None, DUPLICATE, DUPLICATE, None]
    assert [row.get("not_adapted") for row in rows] == reasons
    assert [row["adapted"] for row in rows] == [reason is None for reason in reasons]
    assert [row["update"] for row in rows] == [0] * 4 + [1] * 4 + [2]

    model = tiny_vit()
    rem, preprocessing = REM(model, REMConfig(lr=0.01)), preprocessing_of(model)
    transform = preprocessing.transform()

    def pixels(*images: Image.Image) -> torch.Tensor:
        return preprocessing.normalise(torch.stack([transform(image) for image in images]))

    first = rem(pixels(a, b))
    second = rem.predict(pixels(b, c))
    rem(pixels(c))
    third = rem(pixels(d))
    found = torch.tensor([row["logits"] for row in rows])
    torch.testing.assert_close(found[[0, 3]], first, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[[4, 5]], second, rtol=1e-4, atol=1e-4)  # from before the update on c
    torch.testing.assert_close(found[[8]], third, rtol=1e-4, atol=1e-4)
    delta = load_delta(tmp_path / "run")
    assert (delta.frames, delta.updates) == (4, 3)
    for name, tensor in rem.delta().items():
        torch.testing.assert_close(delta.tensors[name], tensor, rtol=1e-3, atol=1e-6)
    assert counts_of(tmp_path / "run")["not_adapted"] == 5


def test_a_batch_without_a_fit_frame_is_no_update(tmp_path: Path) -> None:
    summary = go(video(None, None, None, a, a, a), tmp_path)
    assert summary.num_predicted == 6 and summary.num_updates == 1
    assert load_delta(tmp_path).frames == 1


def test_a_dark_frame_with_something_on_it_is_not_black(tmp_path: Path) -> None:
    night = np.zeros((32, 32, 3), np.uint8)
    night[10:14, 10:14] = 120  # mean below 2, but a lamp is to be seen
    dim = np.full((32, 32, 3), 4, np.uint8)
    go(video(Image.fromarray(night), Image.fromarray(dim)), tmp_path)
    assert [row["adapted"] for row in lines_of(tmp_path / PREDICTIONS)] == [True, True]


def test_stills_are_learned_from_as_they_are(tmp_path: Path) -> None:
    black = Image.new("RGB", (32, 32))
    stills = [Frame(f"{number}.png", lambda image=image: image) for number, image in enumerate([a, a, black])]  # type: ignore[misc]
    go(Stream("stills", "folder", iter(stills)), tmp_path)
    assert [row["adapted"] for row in lines_of(tmp_path / PREDICTIONS)] == [True] * 3


def test_a_method_that_never_adapts_gives_no_reasons(tmp_path: Path) -> None:
    go(video(a, a, None), tmp_path, "source")
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [(row["adapted"], "not_adapted" in row) for row in rows] == [(False, False)] * 3


def test_a_resumed_run_still_knows_the_frame_before(tmp_path: Path) -> None:
    images = [a, b, c, c, d, d, e]
    go(video(*images), tmp_path / "whole")
    go(video(*images[:3]), tmp_path / "parts")
    go(video(*images), tmp_path / "parts", options={"resume": True})
    whole, parts = ((tmp_path / name / PREDICTIONS).read_bytes() for name in ("whole", "parts"))
    assert parts == whole and whole.count(DUPLICATE.encode()) == 2


def test_while_in_doubt_the_source_answers_unfit_frames_as_well() -> None:
    rem = REM(tiny_vit(), REMConfig(lr=0.05))
    guard = Guard(rem)
    images = random_images(4)
    source = rem.predict(images)
    guard(images)
    assert not torch.equal(guard.predict(images), source) and not guard.from_source
    state = guard.state()
    guard.load_state({**state, "guard.doubting": torch.tensor(1.0)})
    assert torch.equal(guard.predict(images), source) and guard.from_source


@pytest.mark.parametrize("judged", [True, False], ids=["into doubt", "out of doubt"])
def test_a_batch_is_answered_by_one_model_where_the_guard_changes_its_mind(
    judged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(guard: Guard) -> bool:
        guard._now.doubting = not judged  # as the next batch finds it
        return judged

    monkeypatch.setattr(Guard, "_judge", judge)
    images = [a, b, c, c, d, None]
    go(video(*images), tmp_path / "guarded")
    monkeypatch.undo()
    other = ("source",) if judged else ("rem",)
    go(video(*images), tmp_path / "plain", *other, options={"guard": None})
    rows, plain = (lines_of(tmp_path / name / PREDICTIONS) for name in ("guarded", "plain"))
    got, wanted = (torch.tensor([row["logits"] for row in some]) for some in (rows, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert {row.get("answered_by") for row in rows} == {"source" if judged else None}


def test_where_the_guard_has_the_source_answer_it_answers_the_whole_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Guard, "_judge", lambda self: True)
    images = [a, b, c, None, d, d]
    go(video(*images), tmp_path)
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [row.get("answered_by") for row in rows] == ["source"] * 6
    go(video(*images), tmp_path / "source", "source")
    wanted = torch.tensor([row["logits"] for row in lines_of(tmp_path / "source" / PREDICTIONS)])
    torch.testing.assert_close(torch.tensor([row["logits"] for row in rows]), wanted, rtol=1e-4, atol=1e-4)


# The real thing: MJPEG over HTTP, as web cameras serve it


class WebCamera(http.server.BaseHTTPRequestHandler):
    """Serves 6 frames per connection, of another size in each; `most` connections, then none."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.connections += 1
        if server.connections > server.most:
            self.send_error(503)
            return
        height, width = (48, 64) if server.connections == 1 else (60, 80)
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever has seen enough hangs up
            for number in range(6):
                seed = 10 * server.connections + number
                jpeg = cv2.imencode(".jpg", np.asarray(draw_image(seed, width, height)))[1].tobytes()
                if number in server.broken:
                    jpeg = np.random.default_rng(seed).bytes(500)
                self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(jpeg))
                self.wfile.write(jpeg + b"\r\n")
                time.sleep(0.02)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def web_camera() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WebCamera)
    server.connections, server.most, server.broken = 0, 3, ()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    server.url = f"http://user:secret@127.0.0.1:{server.server_port}/live"
    try:
        probe = cv2.VideoCapture(server.url, cv2.CAP_FFMPEG)
        if not probe.grab():
            pytest.skip("this OpenCV reads no MJPEG over HTTP")
        probe.release()
        server.connections, server.most = 0, 2
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_web_camera_that_drops_out_and_comes_back_larger(
    web_camera: Any, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--buffer", "all", "--limit", "9", "-b", "4", "-o", str(run)]
    assert remtta_here("adapt", web_camera.url, *TINY_OPTIONS, "--checkpoint", checkpoint, *options) == 0
    rows = lines_of(run / PREDICTIONS)
    assert [row.get("frame", "gap") for row in rows] == [0, 1, 2, 3, 4, 5, "gap", 6, 7, 8]
    assert all("class" in row and row["adapted"] for row in rows if "gap" not in row)
    assert 0.25 <= rows[6]["seconds"] < 10 and rows[6]["attempts"] == 1
    assert rows[7]["time_s"] - rows[5]["time_s"] == pytest.approx(rows[6]["seconds"], abs=0.01)
    told = capfd.readouterr().err
    assert "is lost (the connection ended); trying to get it back for 60 s" in told
    assert "now gives frames of 80 x 60 pixels" in told
    assert remtta_here("inspect", run) == 0
    assert "frames       9, 0 skipped; 3 updates; 1 gaps\n" in capfd.readouterr().out
    written = [path.read_bytes() for path in run.iterdir() if path.is_file()]
    assert len(written) >= 5 and not any(b"secret" in content for content in [*written, told.encode()])


def test_a_web_camera_with_broken_parts_is_not_lost(web_camera: Any, checkpoint: Path, tmp_path: Path) -> None:
    web_camera.broken = (3, 4)
    options: list[str | Path] = ["--buffer", "all", "--reconnect-for", "0", "-b", "4", "-o", tmp_path]
    assert remtta_here("adapt", web_camera.url, *TINY_OPTIONS, "--checkpoint", checkpoint, *options) == 0
    rows = lines_of(tmp_path / PREDICTIONS)
    assert [row["frame"] for row in rows] == list(range(6))
    assert [row.get("error") for row in rows] == [None, None, None, *["cannot be decoded"] * 2, None]
    assert web_camera.connections == 1


def test_a_process_that_is_reconnecting_ends_on_a_signal_after_a_clean_save(
    web_camera: Any, checkpoint: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    options = ["--checkpoint", str(checkpoint), "--buffer", "all", "-b", "4", "-o", str(run)]
    command = [sys.executable, "-m", "remtta", "adapt", web_camera.url, *TINY_OPTIONS, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    assert happens(lambda: web_camera.connections > 2 and len(lines_of(run / PREDICTIONS)) == 13, within_s=60)
    process.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143, stderr
    assert time.monotonic() - signalled < 30  # a second, but for the end of a busy machine's interpreter; or else 60
    assert json.loads((run / RECORD).read_text())["exit_reason"] == "SIGTERM"
    assert load_delta(run).updates == 3


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--reconnect-for", "5"], "--reconnect-for is for cameras and network streams"),
        (["--buffer", "all"], "--buffer is for cameras and network streams"),
        (["--buffer", "some"], "--buffer"),
        (["--reconnect-for", "-1"], "--reconnect-for"),
    ],
)
def test_options_of_live_sources_are_refused_where_they_mean_nothing(
    options: list[str], told: str, frames: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert remtta_here("adapt", frames, *TINY_OPTIONS, *options) == 2
    assert told in capfd.readouterr().err
