"""What only long runs would show: leaks, clocks that jump, and one kill after another."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
from datetime import datetime, tzinfo
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

import pytest

from remtta.adapt.one_stream import RunSummary
from remtta.engines.interrupts import Interrupts
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from remtta.watching.annotated import AnnotatedVideo, check_video
from remtta.watching.mqtt import Publisher, Topic
from tests.conftest import draw_folder, draw_image
from tests.records import record_of, rows_of
from tests.runs.tiny import StopAfter, adapt_tiny
from tests.streams.fakes import Clock, FakeCamera, noise, source_of
from tests.watching.test_metrics import free_port
from tests.watching.test_mqtt import broker, received
from tests.watching.test_viewing import pictures_of


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for open files in /proc")
def test_neither_open_files_nor_objects_grow_with_the_frames(tmp_path: Path) -> None:
    """`REMTTA_FRAMES=20000` looks longer."""
    num_frames = int(os.environ.get("REMTTA_FRAMES", "240"))
    images = [draw_image(number) for number in range(3)]
    frames = (Frame(f"{number}.png", partial(images.__getitem__, number % 3)) for number in range(num_frames))
    seen: list[tuple[int, int]] = []
    gc.freeze()  # what was there before

    def look(summary: RunSummary) -> None:
        gc.collect()
        seen.append((len(os.listdir("/proc/self/fd")), len(gc.get_objects())))

    stream = Stream("many", "folder", frames, num_frames)
    adapt_tiny(stream, tmp_path / "run", on_batch=look, options={"batch_size": 20, "smooth": "auto"})
    (early_files, early), (late_files, late) = seen[len(seen) // 2], seen[-1]
    assert late_files <= early_files
    assert late - early < num_frames // 4  # frames, rows or tensors that are kept would be one each, at the least


def test_a_clock_that_jumps_changes_no_row_and_no_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(10_000))

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            number = next(jumps)
            return cls.fromtimestamp(1e9 + 3600 * number * (-1) ** number, tz)

    def run(folder: Path) -> RunSummary:
        camera = source_of(FakeCamera([noise(number) for number in range(9)]), Clock())
        stream = Stream("0", "camera", islice(camera.frames(), 9), live_source=camera)
        return adapt_tiny(stream, folder, options={"save_every_s": 1e-3})

    run(tmp_path / "steady")
    for name in ("runs.summary", "runs.record", "runs.scribe", "streams.connection"):
        monkeypatch.setattr(f"remtta.{name}.datetime", Jumping)
    summary = run(tmp_path / "jumping")
    assert summary.exit_reason == "completed" and 0 < summary.seconds < 600 and summary.images_per_s > 0
    steady, jumping = (
        [{key: value for key, value in row.items() if key != "time"} for row in rows_of(tmp_path / name)]
        for name in ("steady", "jumping")
    )
    assert steady == jumping
    assert record_of(tmp_path / "jumping")["counts"] == record_of(tmp_path / "steady")["counts"]


def test_across_kills_a_broker_misses_no_prediction_and_the_videos_no_frame_but_the_last(tmp_path: Path) -> None:
    kills, frames, run = 8, draw_folder(tmp_path / "frames", range(12), "{}.png"), tmp_path / "run"
    port, file, killed = free_port(), tmp_path / "got.txt", tmp_path / "killed"
    sent: list[int] = []

    def part(batches: int | None) -> None:
        """Go on for so many batches, and leave the folder as a kill -9 then would."""

        stop = StopAfter(batches or 0)

        def copy_and_stop(summary: RunSummary) -> None:
            if batches is not None and not killed.exists():
                shutil.copytree(run, killed, ignore=shutil.ignore_patterns("*.tmp"))  # which come and go in a thread
            stop(summary)

        publisher = Publisher(Topic("127.0.0.1", port, "site/cam1"), run, resume=True)
        video = AnnotatedVideo(check_video(run / "out.mp4", run, overwrite=False, resume=True))
        with Interrupts() as interrupts, contextlib.closing(publisher), contextlib.closing(video):
            adapt_tiny(
                frames,
                run,
                resume=True,
                viewers=[publisher, video],
                on_batch=copy_and_stop,
                interrupts=interrupts,
                options={"batch_size": 1},
            )

    with broker(port, file):
        for _ in range(kills):
            part(1)
            shutil.rmtree(run)
            killed.rename(run)
            noted = json.loads((run / "mqtt.json").read_text())["sent_bytes"] if (run / "mqtt.json").exists() else 0
            sent.append((run / "predictions.jsonl").read_bytes()[:noted].count(b"\n"))
            assert set(range(sent[-1])) <= set(received(file))  # what is noted as sent has arrived
        part(None)
        assert set(received(file)) == set(range(12))
    assert [row["index"] for row in rows_of(run)] == list(range(12))
    videos = list(run.glob("out*.mp4"))
    assert sum(len(pictures_of(path)) for path in videos if path.stat().st_size) >= 12 - kills
