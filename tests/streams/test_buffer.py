"""Frames that wait for the model: the newest, or all."""

from __future__ import annotations

import time
from itertools import islice

import pytest

from remtta.streams import buffer as buffer_module
from tests.conftest import happens
from tests.streams.fakes import GATE, HANGS, FakeCamera, levels, numbers, released, source_of


@pytest.mark.parametrize(("keep", "newest"), [(1, [50]), (3, [30, 40, 50])])
def test_latest_keeps_the_newest_frames_for_the_model_and_counts_the_others(keep: int, newest: list[int]) -> None:
    camera = FakeCamera([0, GATE, 10, 20, 30, 40, 50, HANGS])
    source = source_of(camera, buffer="latest")
    source.keep(keep)
    frames = source.frames()
    assert levels([next(frames)]) == [0]
    [capture] = camera.captures
    capture.gate.set()
    assert happens(lambda: capture.step is HANGS)  # all have arrived
    rest = list(islice(frames, len(newest)))
    assert levels(rest) == newest
    assert numbers(rest) == [level // 10 for level in newest]
    assert source.dropped == 5 - len(newest)
    released.set()
    frames.close()


def test_all_has_the_source_wait_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "MAX_WAITING", 3)
    camera = FakeCamera(list(range(20)))
    source = source_of(camera, read_timeout_s=0.1, reconnect_for=0)
    frames = source.frames()
    first = next(frames)
    time.sleep(0.25)  # longer than a read may take: waiting for the model is no hanging
    assert camera.captures[0].num_grabbed == 1 + 3 + 1  # taken, waiting, and the one in the reader's hand
    assert levels([first, *frames]) == list(range(20))
    assert source.dropped == 0


def test_frames_that_are_large_wait_in_smaller_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "MAX_WAITING_BYTES", 2 * 36 * 40 * 3)
    camera = FakeCamera(list(range(20)))
    frames = source_of(camera, reconnect_for=0).frames()
    next(frames)
    time.sleep(0.2)
    assert camera.captures[0].num_grabbed == 1 + 2 + 1
    frames.close()
