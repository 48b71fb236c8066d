"""An evaluation with workers gives the same results as without."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.evaluation import evaluate
from remtta.evaluation.domains import Dataset
from remtta.methods.settings import REMConfig
from remtta.options import EvalOptions
from tests.conftest import happens, tiny_vit
from tests.evaluation.test_resume import without_timing
from tests.records import rows_of


class Soon(Interrupts):
    """A signal that comes when an evaluation looks for the fourth time."""

    calls = 0

    def check(self) -> None:
        self.calls += 1
        if self.calls == 4:
            raise Stopped(15)


def kill_a_worker(evaluation: Path) -> None:
    assert happens(lambda: any(evaluation.glob(".runs/*/predictions.jsonl")), within_s=120)
    pid = multiprocessing.active_children()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_workers_come_to_the_same_though_one_dies(tree: Dataset, tmp_path: Path) -> None:
    methods = {"source": None, "rem+guard": REMConfig(lr=0.02)}
    options = EvalOptions(batch_size=5, engine="processes", jobs=1, save_every_s=0.0, resume=True)
    with pytest.raises(Stopped):  # begun here, in the first of them, and gone on with by workers
        before = EvalOptions(batch_size=5)
        evaluate(tiny_vit(), tree, tmp_path / "grid", methods=methods, options=before, interrupts=Soon())
    killer = threading.Thread(target=kill_a_worker, args=(tmp_path / "grid",))
    killer.start()
    made = evaluate(tiny_vit(), tree, tmp_path / "grid", methods=methods, options=options)
    wanted = evaluate(tiny_vit(), tree, tmp_path / "serial", methods=methods, options=EvalOptions(batch_size=5))
    killer.join()
    assert rows_of(tmp_path / "grid") == rows_of(tmp_path / "serial")
    assert list(made["methods"]) == list(wanted["methods"])
    assert without_timing(made) == without_timing(wanted)
    assert sorted(os.listdir(tmp_path / "grid")) == sorted(os.listdir(tmp_path / "serial"))
    assert os.listdir(tmp_path / "grid" / "deltas") == os.listdir(tmp_path / "serial" / "deltas")
