"""Frames of a slow source are predicted before their batch is full, and learned from with it."""

import io
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from remtta import RunOptions, load_delta
from remtta.interrupts import Interrupts
from remtta.models.preprocessing import preprocessing_of
from remtta.runs.folder import PREDICTIONS, STATE
from remtta.runs.pipe import RowPipe
from remtta.runs.saving import load_position
from remtta.runs.summary import RunProgress
from remtta.streams.batches import Batches
from remtta.streams.live import LiveSource
from remtta.streams.prefetch import PAUSE, DecodedFrame
from tests.conftest import happens, same_tensors, tiny_vit
from tests.records import num_rows, record_of, rows_of
from tests.runs.tiny import adapt_tiny, camera, received_frames


def patient(run: Path, rows: int) -> None:
    """Wait until a run has written so many rows."""
    assert happens(lambda: num_rows(run) >= rows, 30)


def test_a_slow_source_has_its_frames_predicted_before_the_batch_is_full(tmp_path: Path) -> None:
    run, usual, echo = tmp_path / "run", tmp_path / "usual", io.BytesIO()
    adapt_tiny(camera(7), usual)
    rows_there = {2: partial(patient, run, 2), 5: partial(patient, run, 5)}
    adapt_tiny(camera(7, rows_there), run, callbacks=[RowPipe(echo)], options={"flush_after": 0.05})
    rows, expected = rows_of(run), rows_of(usual)
    assert [row["index"] for row in rows if row.get("early")] == [0, 1, 3, 4]
    assert [(row["index"], row["class"], row["update"], row["adapted"]) for row in rows] == [
        (row["index"], row["class"], row["update"], row["adapted"]) for row in expected
    ]
    assert [row["entropy"] for row in rows] == pytest.approx([row["entropy"] for row in expected], abs=1e-4)
    assert echo.getvalue() == (run / PREDICTIONS).read_bytes()
    assert record_of(run)["counts"] == record_of(usual)["counts"]
    assert same_tensors(load_delta(run).tensors, load_delta(usual).tensors)  # learned from whole batches, as without


def test_a_stop_predicts_the_frames_that_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, received = tmp_path / "run", received_frames(monkeypatch)

    stopped = threading.Event()

    def stop() -> None:
        assert happens(lambda: 4 in received, 30)
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.wait(30)

    with Interrupts() as interrupts:
        summary = adapt_tiny(camera(6, {5: stop}), run, interrupts=interrupts)
    stopped.set()
    assert summary.exit_reason == "SIGTERM" and summary.num_updates == 1
    assert [row["index"] for row in rows_of(run)] == list(range(5))
    assert [row["index"] for row in rows_of(run) if row.get("early")] == [3, 4]
    assert record_of(run)["counts"]["frames"] == 5
    place, _ = load_position(run / STATE, RunProgress)
    assert (place.frames, place.updates) == (3, 1)  # what was learned from
    adapt_tiny(camera(3), run, resume=True)
    assert [row["index"] for row in rows_of(run)] == list(range(8))  # a camera does not show them again
    assert record_of(run)["counts"]["updates"] == 2


def readable(index: int) -> DecodedFrame:
    return DecodedFrame(index, f"{index}.png", None, None, torch.zeros(3, 2, 2, dtype=torch.uint8))


def test_each_frame_is_early_once_and_comes_with_its_batch() -> None:
    now = 0.0

    def stream() -> Iterator[DecodedFrame]:
        nonlocal now
        for index in range(5):
            yield readable(index)
            now += 1.0
            yield PAUSE

    options = RunOptions(batch_size=4, flush_after=2.0)
    batches = Batches(None, options, preprocessing_of(tiny_vit()), clock=lambda: now)
    told = [(batch.early, [frame.index for frame in batch.frames]) for batch in batches.batched(stream())]
    assert told == [(True, [0, 1]), (False, [0, 1, 2, 3]), (False, [4])]


@pytest.mark.parametrize(
    ("live", "finite", "flush_after", "waited"),
    [(True, False, None, 2.0), (True, False, 600.0, 600.0), (False, False, None, None), (True, True, None, None)],
    ids=["live", "told otherwise", "file", "a video behind an address, the same at each reading"],
)
def test_a_lone_frame_of_a_live_source_waits_for_two_seconds_at_most(
    live: bool, finite: bool, flush_after: float | None, waited: float | None
) -> None:
    now, source = 0.0, LiveSource(0) if live else None
    if source:
        source.finite = finite

    def stream() -> Iterator[DecodedFrame]:
        nonlocal now
        yield readable(0)
        while now < 1000:
            now += 1.0
            yield PAUSE

    options = RunOptions(batch_size=4, flush_after=flush_after)
    first = next(Batches(source, options, preprocessing_of(tiny_vit()), clock=lambda: now).batched(stream()))
    assert (now if first.early else None) == waited
