"""Runs of earlier versions: they go on unless they used what was removed since."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta.errors import UsageError
from remtta.evaluation import evaluate
from remtta.options import EvalOptions
from remtta.runs.folder import RECORD, RESULTS, STATE
from remtta.runs.states import load_state, save_state
from tests.conftest import tiny_vit
from tests.evaluation.trees import open_tree, write_tree
from tests.records import json_of, record_of
from tests.runs.tiny import adapt_tiny


def as_earlier(folder: Path, group: str, **entries: Any) -> None:
    """Have a run's record say what an earlier version's said."""
    record = record_of(folder)
    record[group] |= entries
    (folder / RECORD).write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("group", "entry", "unused", "used", "what"),
    [
        ("options", "share", 0.0, 0.1, "--share"),
        ("options", "memory", 0, 4, "--memory"),
        ("options", "adapt", "always", "auto", "--adapt auto"),
        ("method", "name", "rem", "tda", "tda"),
        ("method", "gap_weighting", False, True, "gap_weighting"),
        ("environment", "processes", 1, 2, "torchrun"),
    ],
)
def test_a_run_goes_on_unless_it_used_what_was_removed(
    group: str, entry: str, unused: Any, used: Any, what: str, made: Path, tmp_path: Path
) -> None:
    frames = made / "frames"
    shutil.copytree(made / "whole", tmp_path / "run")
    as_earlier(tmp_path / "run", group, **{entry: unused})
    assert adapt_tiny(frames, tmp_path / "run", resume=True).num_resumed == 1
    as_earlier(tmp_path / "run", group, **{entry: used})
    with pytest.raises(
        UsageError, match=f"run was started with .*{what}.*, which remtta no longer has.* choose another --output"
    ):
        adapt_tiny(frames, tmp_path / "run", resume=True)


def test_a_state_goes_on_unless_it_has_what_was_removed(tmp_path: Path) -> None:
    tensors = {"delta.norm": torch.ones(2), "memory.seen": torch.tensor(0)}
    save_state(tmp_path / STATE, {}, tensors)
    assert load_state(tmp_path / STATE)[1].keys() == {"delta.norm"}
    save_state(tmp_path / STATE, {}, {**tensors, "memory.seen": torch.tensor(20)})
    with pytest.raises(UsageError, match="was started with --memory, which remtta no longer has"):
        load_state(tmp_path / STATE)


@pytest.mark.parametrize("name", ["tent+memory", "a=batclip+guard"])
def test_an_evaluation_goes_on_unless_it_used_what_was_removed(name: str, tmp_path: Path) -> None:
    tree, out = open_tree(write_tree(tmp_path / "tree", ["fog"], each=1)), tmp_path / "out"

    def run(**how: Any) -> None:
        evaluate(tiny_vit(), tree, out, methods=["tent"], options=EvalOptions(**how))

    run()
    run(resume=True)
    record = json_of(out / RESULTS)
    record["settings"]["methods"][name] = record["settings"]["methods"].pop("tent")
    (out / RESULTS).write_text(json.dumps(record))
    with pytest.raises(UsageError, match=re.escape(f"out was started with {name}, which remtta no longer has")):
        run(resume=True)


def test_answers_weighted_by_who_sees_more_are_gone(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "whole", tmp_path / "run")
    guard = record_of(tmp_path / "run")["options"]["guard"]
    as_earlier(tmp_path / "run", "options", guard={**guard, "answer": "auto"})
    with pytest.raises(UsageError, match="run was started with --answer auto, which remtta no longer has"):
        adapt_tiny(made / "frames", tmp_path / "run", resume=True)
