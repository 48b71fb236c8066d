"""Faults that only long runs show: leaks, clocks that jump, and one kill after another."""

from __future__ import annotations

import gc
import os
from datetime import datetime, tzinfo
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Self

import pytest

from remtta.adapt.one_stream import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import draw_image
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny
from tests.streams.fakes import Clock, FakeCamera, noise, source_of


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
