"""An evaluation that was stopped or killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta.errors import RemttaError, UsageError
from remtta.evaluation import evaluate
from remtta.evaluation.datasets import Dataset
from remtta.methods import rem as rem_module
from remtta.methods.losses import rem_loss
from remtta.options import EvalOptions
from remtta.runs.interrupts import Interrupts, Stopped
from tests.conftest import tiny_vit
from tests.evaluation.trees import methods_of
from tests.records import json_of, rows_of


class _Die(BaseException):
    """Stands for kill -9: nothing is cleaned up in the evaluation's name."""


@pytest.mark.parametrize(
    ("scenario", "killed_at"), [("continual", 1), ("continual", 7), ("mixed", 4), ("time-constrained", 7)]
)
def test_after_a_kill_resuming_gives_the_same_results(
    scenario: str, killed_at: int, tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        options = EvalOptions(
            scenario=scenario,
            batch_size=5,
            seeds=(0, 1),
            save_every_s=0.0,
            cost_ratio=2.0 if scenario == "time-constrained" else None,
            revisit=True,
            **changes,
        )
        return evaluate(tiny_vit(), tree, folder, methods=methods_of("source", "rem", lr=0.02), options=options)

    whole = run(tmp_path / "whole")
    calls = 0

    def dying(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == killed_at:
            with open(tmp_path / "killed" / "predictions.jsonl", "ab") as file:
                file.write(b'{"torn')
            raise _Die
        return rem_loss(*args)

    monkeypatch.setattr(rem_module, "rem_loss", dying)
    with pytest.raises(_Die):
        run(tmp_path / "killed")
    monkeypatch.undo()
    resumed = run(tmp_path / "killed", resume=True)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert without_timing(resumed) == without_timing(whole)
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(tmp_path / "whole"))


def without_timing(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: without_timing(value) for key, value in content.items() if key != "timing"}
    return content


def test_a_signal_saves_the_progress(tree: Dataset, tmp_path: Path) -> None:
    class Soon(Interrupts):
        calls = 0

        def check(self) -> None:
            self.calls += 1
            if self.calls == 4:
                raise Stopped(15)

    options = EvalOptions(batch_size=4)
    with pytest.raises(Stopped):
        evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=options, interrupts=Soon())
    assert (tmp_path / "run" / ".progress.safetensors").is_file()
    evaluate(
        tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=EvalOptions(batch_size=4, resume=True)
    )
    whole = evaluate(tiny_vit(), tree, tmp_path / "whole", methods=methods_of("rem"), options=options)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert whole["status"] == "completed"


def test_resuming_needs_the_same_settings_and_something_to_resume(tree: Dataset, tmp_path: Path) -> None:
    results = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"))
    with pytest.raises(UsageError, match="holds an earlier evaluation; go on with it by --resume"):
        evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"))
    resume = EvalOptions(resume=True)
    again = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"), options=resume)
    assert again == json.loads(json.dumps(results))
    record = json_of(tmp_path / "run" / "results.json")
    (tmp_path / "run" / "results.json").write_text(json.dumps({**record, "status": "running"}))
    with pytest.raises(UsageError, match=r"--resume needs the settings the run began with: methods"):
        evaluate(
            tiny_vit(),
            tree,
            tmp_path / "run",
            methods=methods_of("tent"),
            options=EvalOptions(resume=True, batch_size=3),
        )
    begun = evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)
    assert begun["methods"]["source"]["mean"] == results["methods"]["source"]["mean"]
    (tmp_path / "new" / "results.json").unlink()
    with pytest.raises(UsageError, match=r"has lost its results\.json"):
        evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)
    (tmp_path / "new" / "results.json").write_text("[]")
    with pytest.raises(RemttaError, match=r"results\.json is damaged"):
        evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)
