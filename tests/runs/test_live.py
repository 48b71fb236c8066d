"""Runs over cameras and network streams that get lost, hang, come back changed, or are faster than the model."""

import os
import signal
import threading
import time
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from remtta.errors import UsageError
from remtta.interrupts import Interrupts
from remtta.options import LiveOptions
from remtta.runs.folder import EVENTS, PREDICTIONS, STATE
from remtta.runs.inspection import describe_run
from remtta.runs.saving import Saver, load_position
from remtta.runs.summary import RunProgress, RunSummary
from remtta.streams.live import LiveSource
from remtta.streams.sources import Stream, open_stream
from tests.conftest import happens, meanwhile
from tests.records import lines_of, num_rows, record_of, rows_of
from tests.runs.tiny import Each, adapt_tiny, camera
from tests.streams.fakes import UNDECODABLE, Clock, FakeCamera, FakeCapture, Script, Slow, noise, source_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def cam(*scripts: Script, limit: int | None = None, **options: Any) -> Stream:
    """A stream of a fake camera that ends with its last script."""
    source = source_of(FakeCamera(*scripts), Clock(), reconnect_for=60, **options)
    return Stream("0", "camera", islice(source.frames(), limit), live_source=source)


GAP = {"source": "camera 0", "seconds": 0.5, "reason": "the connection ended", "attempts": 1}


def test_a_gap_is_a_line_at_its_place_in_the_predictions_and_in_the_events(tmp_path: Path) -> None:
    stream = cam([noise(0), noise(1)], [noise(2), UNDECODABLE, noise(3)], limit=5)
    summary = adapt_tiny(stream, tmp_path, options={"guard": None})
    rows = rows_of(tmp_path)
    assert rows[2] == {"gap": True, **GAP, "time": rows[3]["time"]}
    assert [row["index"] for row in rows if "gap" not in row] == [0, 1, 2, 3, 4]
    assert [row.get("error") for row in rows] == [None, None, None, None, "cannot be decoded", None]
    assert [row["adapted"] for row in rows if "class" in row] == [True] * 4
    [event] = lines_of(tmp_path / EVENTS)
    assert {"frame": 2, "event": "gap", **GAP}.items() <= event.items() and "time" in event
    assert (summary.num_frames, summary.num_skipped, summary.num_updates) == (5, 1, 2)
    assert record_of(tmp_path)["counts"]["gaps"] == 1 and record_of(tmp_path)["counts"]["dropped"] == 0
    told = describe_run(tmp_path)["predictions"]
    assert (told["predicted"], told["errors"], told["gaps"]) == (4, 1, 1)


def test_the_age_of_a_frame_does_not_follow_the_systems_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class HourBefore(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr("remtta.runs.run_writer.datetime", HourBefore)
    clock = Clock()
    camera = FakeCamera([noise(0), noise(1), noise(2)], capture=lambda script: Slow(script, clock, 0.25))
    source = source_of(camera, clock, reconnect_for=0)
    summary = adapt_tiny(Stream("0", "camera", source.frames(), live_source=source), tmp_path)
    assert summary.lag_s in (0.5, 0.75)  # of the first of three frames, 0.25 s apart, maybe read until the end


def test_frames_do_not_wait_for_the_end_of_a_gap_to_be_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remtta.streams.batches.LOST_S", 0.05)
    back = threading.Event()
    captures = iter([FakeCapture([noise(0), noise(1)]), FakeCapture([noise(2), noise(3)])])

    def connect() -> FakeCapture:
        if source.state == "reconnecting":
            back.wait(20)
        return next(captures)

    def watch() -> None:
        assert happens(lambda: num_rows(tmp_path) == 2)
        back.set()

    source = source_of(connect)
    stream = Stream("0", "camera", islice(source.frames(), 4), live_source=source)
    with meanwhile(watch):
        adapt_tiny(stream, tmp_path, options={"guard": None})
    rows = [row for row in rows_of(tmp_path) if "gap" not in row]
    assert [(row["index"], row["update"]) for row in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_a_gap_counts_though_the_run_stops_before_its_batch_is_full(tmp_path: Path) -> None:
    camera = cam([noise(0), noise(1), noise(2), noise(3)], [noise(4), noise(5)], limit=5)

    def stop(summary: RunSummary) -> None:
        if len(rows_of(tmp_path)) == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with Interrupts() as interrupts:
        options = {"flush_after": 0.0, "guard": None}
        adapt_tiny(camera, tmp_path, options=options, callbacks=[Each(stop)], interrupts=interrupts)
    assert record_of(tmp_path)["counts"]["gaps"] == 1
    assert [(event["frame"], event["event"]) for event in lines_of(tmp_path / EVENTS)] == [(4, "gap")]


def test_a_run_continues_over_gaps_with_the_right_numbers(tmp_path: Path) -> None:
    adapt_tiny(cam([noise(0)], [noise(1), noise(2)], [noise(3)], limit=4), tmp_path)
    assert load_position(tmp_path / STATE, RunProgress)[0].gaps == 2
    # As a kill before the first save would leave it.
    (tmp_path / STATE).unlink()
    adapt_tiny(cam([noise(4)], [noise(5)], limit=2), tmp_path, resume=True)
    rows = rows_of(tmp_path)
    assert [row.get("index", "gap") for row in rows] == [0, "gap", 1, 2, "gap", 3, 4, "gap", 5]
    assert record_of(tmp_path)["counts"]["frames"] == 6 and record_of(tmp_path)["counts"]["gaps"] == 3
    events = [(event["frame"], event["event"]) for event in lines_of(tmp_path / EVENTS)]
    assert events == [(1, "gap"), (3, "gap"), (4, "resumed"), (5, "gap")]


def test_a_limit_counts_the_frames_of_all_parts_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for levels, limit in (((0, 1), 2), ((2, 3, 4, 5), 5), ((6,), 5)):
        source = source_of(FakeCamera([noise(level) for level in levels]), Clock())
        monkeypatch.setattr("remtta.streams.sources.LiveSource", lambda *_, source=source, **__: source)
        adapt_tiny(open_stream("0", limit=limit), tmp_path, resume=True)
    assert source.state == "opening"  # nothing was left to read
    assert [(row["index"], row["frame"]) for row in rows_of(tmp_path)] == [(0, 0), (1, 1), (2, 0), (3, 1), (4, 2)]


def finite(count: int, limit: int | None = None) -> Stream:
    """A stream of a video of so many frames behind an address."""
    script = [noise(number) for number in range(count)]
    source = source_of(FakeCamera(script, capture=partial(FakeCapture, promised=count)), Clock())
    return Stream("http://host/clip.mp4", "url", islice(source.frames(), limit), live_source=source)


def test_a_finite_video_behind_an_address_continues_where_it_was(tmp_path: Path) -> None:
    adapt_tiny(finite(9), tmp_path / "whole")
    for limit in (6, None, None):
        summary = adapt_tiny(finite(9, limit), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / PREDICTIONS).read_bytes() == (tmp_path / "whole" / PREDICTIONS).read_bytes()
    assert [row["frame"] for row in rows_of(tmp_path / "run")] == list(range(9))
    assert not any("time" in row for row in rows_of(tmp_path / "run"))
    assert summary.num_frames == 9 and summary.exit_reason == "completed"
    with pytest.raises(UsageError, match=r"clip.mp4 holds 5 frames, and the run had seen 9"):
        adapt_tiny(finite(5), tmp_path / "run", resume=True)


def test_what_was_learned_is_saved_while_no_frame_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Saver, "after_batch", lambda saver: None)
    seen = []

    def wait() -> None:
        assert happens(lambda: (tmp_path / STATE).exists() and record_of(tmp_path)["counts"]["frames"] == 3)
        seen.append(load_position(tmp_path / STATE, RunProgress)[0].frames)

    adapt_tiny(camera(6, {3: wait}), tmp_path, options={"save_every_s": 0.1})
    assert seen == [3] and record_of(tmp_path)["counts"]["frames"] == 6


def test_a_signal_ends_a_run_that_is_reconnecting(tmp_path: Path) -> None:
    source = LiveSource(0, LiveOptions(), connect=FakeCamera([noise(0), noise(1)]))  # real time
    stopped_at = []

    def stop() -> None:
        assert happens(lambda: source.state == "reconnecting")
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(stop), Interrupts() as interrupts:
        stream = Stream("0", "camera", source.frames(), live_source=source)
        summary = adapt_tiny(stream, tmp_path, options={"batch_size": 1}, interrupts=interrupts)
    assert time.monotonic() - stopped_at[0] < 10
    assert summary.exit_reason == "SIGTERM"
    assert summary.num_frames + record_of(tmp_path)["counts"]["dropped"] == 2
