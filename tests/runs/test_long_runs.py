"""Faults that only long runs show: leaks, clocks that jump, and one kill after another."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path

import pytest

from remtta.adapt.one_stream import RunSummary
from remtta.streams.frames import Frame
from remtta.streams.sources import Stream
from tests.conftest import draw_image
from tests.runs.tiny import adapt_tiny


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
