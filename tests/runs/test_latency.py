"""Predictions that go out before the update on their batch begins."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from remtta.adapt.one_stream import RunSummary
from remtta.deltas import DELTA
from remtta.engines.interrupts import Interrupts
from remtta.methods.method import Updater
from remtta.methods.settings import REMConfig
from remtta.runs.folder import PREDICTIONS
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny


def go(source: Path, folder: Path, *, lr: float = 0.01, resume: bool = False, **more: Any) -> RunSummary:
    """Run; what is neither `echo` nor `on_batch` is an option."""
    own = {name: more.pop(name, None) for name in ("echo", "on_batch")}
    with Interrupts() as interrupts:
        config = REMConfig(lr=lr)
        return adapt_tiny(source, folder, config=config, resume=resume, options=more, interrupts=interrupts, **own)


def test_predictions_are_out_before_the_update_and_stay_the_same(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(frames, tmp_path / "usual", guard=None)
    echo = io.BytesIO()
    out_before: list[int] = []
    learn = Updater.learn

    def watched(self: Updater[Any]) -> None:
        on_disk = (tmp_path / "early" / PREDICTIONS).read_bytes()
        assert on_disk == echo.getvalue()
        out_before.append(on_disk.count(b"\n"))
        learn(self)

    monkeypatch.setattr(Updater, "learn", watched)
    go(frames, tmp_path / "early", echo=echo, guard=None, latency=True)
    usual, early = rows_of(tmp_path / "usual"), rows_of(tmp_path / "early")
    assert out_before == [min(3 * number, len(early)) for number in range(1, len(out_before) + 1)]
    assert [(row["class"], row["update"], row["adapted"]) for row in early] == [
        (row["class"], row["update"], row["adapted"]) for row in usual
    ]
    for row, wanted in zip(early, usual, strict=True):
        assert row["entropy"] == pytest.approx(wanted["entropy"], abs=1e-4)
    assert record_of(tmp_path / "early")["counts"] == record_of(tmp_path / "usual")["counts"]
    assert record_of(tmp_path / "early")["options"]["latency"] is True


def test_a_stop_during_the_update_loses_nothing(frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "run"
    go(frames, whole, latency=True)
    learn, seen = Updater.learn, 0

    def stopped(self: Updater[Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        learn(self)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "learn", stopped)
        patch.setattr("remtta.runs.session.PATIENCE_S", 0.0)  # as if a batch took long
        summary = go(frames, folder, latency=True)
    assert summary.exit_reason == "SIGTERM"
    record = record_of(folder)
    assert record["counts"]["frames"] == len(rows_of(folder)) == 6
    assert record["counts"]["updates"] == 1
    go(frames, folder, latency=True, resume=True)
    assert (folder / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes()
    assert record_of(folder)["counts"] == record_of(whole)["counts"]
    assert (folder / DELTA).stat().st_size == (whole / DELTA).stat().st_size
