"""An evaluation that was stopped or killed goes on as if nothing had happened, and so do its workers."""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta import REMConfig, adapt_stream
from remtta.errors import UsageError
from remtta.interrupts import Interrupts, Stopped
from remtta.lab.evaluation.domains import Dataset
from remtta.methods import rem as rem_module
from remtta.methods.losses import rem_loss
from remtta.options import RunOptions
from tests.conftest import draw_image, happens, meanwhile, tiny_vit
from tests.lab.evaluation.trees import evaluate_tiny, methods_of, open_tree
from tests.records import json_of, rows_of


class _Die(BaseException):
    """Stands for kill -9: nothing is cleaned up in the evaluation's name."""


def kill_at(call: int, monkeypatch: pytest.MonkeyPatch, run: Callable[[], object], folder: Path) -> None:
    """Let an evaluation in a folder die in the middle of an update, with half a row written."""
    calls = itertools.count(1)

    def dying(*args: Any) -> torch.Tensor:
        if next(calls) == call:
            with open(folder / "predictions.jsonl", "ab") as file:
                file.write(b'{"torn')
            raise _Die
        return rem_loss(*args)

    with monkeypatch.context() as patch, pytest.raises(_Die):
        patch.setattr(rem_module, "rem_loss", dying)
        run()


@pytest.mark.parametrize(
    ("choices", "killed_at"), [({"seeds": (0, 1)}, 7), ({"scenario": "time-constrained", "cost_ratio": 2.0}, 2)]
)
def test_after_a_kill_resuming_gives_the_same_results(
    choices: dict[str, Any], killed_at: int, tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = open_tree(tree.root, limit=10)

    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        options = {"batch_size": 5, "save_every_s": 0.0, "revisit": True, **choices, **changes}
        return evaluate_tiny(few, folder, methods_of("source", "rem", lr=0.02), **options)

    whole = run(tmp_path / "whole")
    kill_at(killed_at, monkeypatch, lambda: run(tmp_path / "killed"), tmp_path / "killed")
    resumed = run(tmp_path / "killed", resume=True)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert without_timing(resumed) == without_timing(whole)
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(tmp_path / "whole"))


def without_timing(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: without_timing(value) for key, value in content.items() if key != "timing"}
    return content


def test_methods_and_seeds_are_added_to_an_evaluation_as_if_they_had_been_there(tree: Dataset, tmp_path: Path) -> None:
    few, names = open_tree(tree.root, limit=8), ("tent", "source", "rem")

    def run(name: str, methods: Sequence[str], seeds: Sequence[int] = (0, 1)) -> dict[str, Any]:
        configs = methods_of(*methods, lr=0.02)
        return evaluate_tiny(few, tmp_path / name, configs, batch_size=8, seeds=seeds, resume=True)

    whole = run("whole", names)
    run("parts", ["source", "rem"])
    before = (tmp_path / "parts" / "predictions.jsonl").read_bytes()
    added = run("parts", names)
    assert without_timing(added) == without_timing(whole)
    assert list(added["methods"]) == list(json_of(tmp_path / "parts" / "results.json")["methods"]) == list(names)
    rows = rows_of(tmp_path / "parts")
    assert (tmp_path / "parts" / "predictions.jsonl").read_bytes().startswith(before)  # nothing was run again
    assert [row for row in rows if row["method"] == "tent"] == rows[-32:] and len(rows) == (1 + 2 + 2) * 16
    assert "tent" in (tmp_path / "parts" / "table.md").read_text()
    reordered = run("parts", ["source", "rem", "tent"])
    assert list(reordered["methods"]) == ["source", "rem", "tent"]
    assert without_timing(reordered["methods"]["tent"]) == without_timing(whole["methods"]["tent"])
    run("one", ["source", "rem"], seeds=(1,))
    one = run("one", names)
    assert without_timing(one["methods"]["rem"]) == without_timing(whole["methods"]["rem"])
    assert [list(result["methods"]["source"]["seeds"]) for result in (whole, one)] == [["0"], ["1"]]  # it runs once
    assert len(rows_of(tmp_path / "one")) == len(rows)


def test_a_method_that_is_not_finished_may_be_changed_or_left_out(
    tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, three = open_tree(tree.root, limit=10), dict.fromkeys(("source", "rem+guard", "tent"))

    run = partial(evaluate_tiny, few, batch_size=5, save_every_s=0.0)
    kill_at(3, monkeypatch, lambda: run(tmp_path / "killed", three), tmp_path / "killed")
    changes: tuple[dict[str, Any], ...] = (
        {**three, "rem+guard": {"lr": 0.02}},
        {"source": None, "tent": None},
        {"tent": {"lr": 0.02}, "source": None, "a=rem": None},
    )
    for number, methods in enumerate(changes):
        shutil.copytree(tmp_path / "killed", tmp_path / f"resumed{number}")
        resumed = run(tmp_path / f"resumed{number}", methods, resume=True)
        whole = run(tmp_path / f"whole{number}", methods)
        assert without_timing(resumed) == without_timing(whole) and list(resumed["methods"]) == list(methods)
        rows = [sorted(map(str, rows_of(tmp_path / f"{name}{number}"))) for name in ("resumed", "whole")]
        assert rows[0] == rows[1]
    with pytest.raises(UsageError, match="also has source, and --resume keeps all finished methods: add it to"):
        run(tmp_path / "killed", {"tent": None}, resume=True)


def test_what_keeps_an_evaluation_from_going_on_is_reported_in_one_line(tree: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    evaluate_tiny(tree, run, methods_of("source", "tent", "rem"))

    def refusal(dataset: Dataset, methods: Mapping[str, Any], **options: Any) -> str:
        with pytest.raises(UsageError) as refused:
            evaluate_tiny(dataset, run, methods, resume=True, **options)
        return str(refused.value)

    three = methods_of("source", "tent", "rem")
    assert refusal(tree, methods_of("source")) == (
        f"the evaluation in {run} also has tent, rem, and --resume keeps all finished methods: add them to --methods, "
        "or choose another --output"
    )
    prefix = "--resume needs the settings the run began with: "
    remedy = "; use the same value again, or choose another --output"
    changed = {**three, **methods_of("rem", lr=0.5), **methods_of("eta")}
    assert refusal(tree, changed) == f"{prefix}methods.rem.lr was 0.001, is 0.5{remedy}"
    assert refusal(tree, three, batch_size=3) == f"{prefix}options.batch_size was 50, is 3{remedy}"
    assert refusal(tree, three, seeds=(1, 2)).startswith(f"{prefix}options.seeds")
    message = refusal(replace(tree, domains=tree.domains[:1]), three)
    assert message.startswith(f'{prefix}data.domains.fog5 was "21 images, ') and message.endswith(f", is null{remedy}")
    draw_image(3, 32, 32).save(tree.domains[0].sources[0])
    message = refusal(open_tree(tree.root), {**three, **methods_of("eta")})
    assert re.match(
        rf'{prefix}data.domains.gaussian_noise5 was "(21 images, \w{{6}}) \w{{6}}", is "\1 \w{{6}}"; use', message
    )
    message = refusal(tree, {**three, **methods_of("rem", lr=0.5, margin=0.5, anchor=0.5, steps=2, momentum=0.5)})
    assert message.endswith(f"; and 2 more{remedy}")
    (run / "predictions.jsonl").write_text("")
    assert evaluate_tiny(tree, run, three, resume=True) == json_of(run / "results.json")
    assert "no longer holds the evaluation's rows" in refusal(tree, {**three, **methods_of("eta")})


def test_runs_and_evaluations_do_not_share_a_folder(tree: Dataset, frames: Path, tmp_path: Path) -> None:
    adapt_stream(tiny_vit(), frames, tmp_path / "run")
    evaluate_tiny(tree, tmp_path / "table")
    choices: list[dict[str, Any]] = [{}, {"resume": True}, {"overwrite": True}]
    for options in choices:
        with pytest.raises(UsageError, match="run holds a run of remtta adapt; choose another --output"):
            evaluate_tiny(tree, tmp_path / "run", **options)
        with pytest.raises(UsageError, match="table holds an evaluation; choose another --output"):
            adapt_stream(tiny_vit(), frames, tmp_path / "table", options=RunOptions(**options))


def test_resuming_needs_something_to_resume(tree: Dataset, tmp_path: Path) -> None:
    results = evaluate_tiny(tree, tmp_path / "run")
    with pytest.raises(UsageError, match="holds an evaluation already"):
        evaluate_tiny(tree, tmp_path / "run")
    assert evaluate_tiny(tree, tmp_path / "run", resume=True) == json.loads(json.dumps(results))
    begun = evaluate_tiny(tree, tmp_path / "new", resume=True)
    assert begun["methods"]["source"]["mean"] == results["methods"]["source"]["mean"]
    (tmp_path / "new" / "results.json").unlink()
    with pytest.raises(UsageError, match=r"has lost its results\.json"):
        evaluate_tiny(tree, tmp_path / "new", resume=True)
    for record, reason in (
        ('{"status": "running", "settings": {"methods": {}}}', r" \(KeyError: 'options'\)"),
        ("[]", r" \(it is not a JSON object\)"),
    ):
        (tmp_path / "new" / "results.json").write_text(record)
        with pytest.raises(UsageError, match=rf"results\.json is damaged{reason}"):
            evaluate_tiny(tree, tmp_path / "new", resume=True)


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


def test_what_workers_began_goes_on_without(tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[tuple[str, int]]()

    def here(work: Any, shared: Any, tasks: Any, *, jobs: int, interrupts: Any) -> Iterator[tuple[int, bool]]:
        for number, task in enumerate(tasks):
            ran.append((task.method, jobs))
            yield number, work(shared, task, lambda: 0)
            if jobs == 2:
                raise Stopped(15)

    monkeypatch.setattr("remtta.lab.evaluation.evaluating.in_processes", here)
    run = partial(evaluate_tiny, tree, methods=("source", "tent"), batch_size=5)
    with pytest.raises(Stopped):
        run(folder=tmp_path / "run", engine="processes", jobs=2)
    rows = tmp_path / "run" / ".runs" / "source_seed0" / "predictions.jsonl"
    modified = rows.stat().st_mtime_ns
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)  # keep the workers' files
    run(folder=tmp_path / "run", resume=True)
    assert ran == [("source", 2), ("source", 1), ("tent", 1)] and rows.stat().st_mtime_ns == modified
    monkeypatch.undo()
    run(folder=tmp_path / "whole")
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")


def test_workers_come_to_the_same_though_one_dies(tree: Dataset, tmp_path: Path) -> None:
    methods = {"source": None, "rem+guard": REMConfig(lr=0.02)}
    run = partial(evaluate_tiny, tree, methods=methods, batch_size=5)
    with pytest.raises(Stopped):  # begun here, in the first of them, and gone on with by workers
        run(folder=tmp_path / "grid", interrupts=Soon())
    with meanwhile(partial(kill_a_worker, tmp_path / "grid")):
        made = run(folder=tmp_path / "grid", engine="processes", jobs=1, save_every_s=0.0, resume=True)
    wanted = run(folder=tmp_path / "serial")
    assert rows_of(tmp_path / "grid") == rows_of(tmp_path / "serial")
    assert list(made["methods"]) == list(wanted["methods"])
    assert without_timing(made) == without_timing(wanted)
    assert sorted(os.listdir(tmp_path / "grid")) == sorted(os.listdir(tmp_path / "serial"))
    assert os.listdir(tmp_path / "grid" / "deltas") == os.listdir(tmp_path / "serial" / "deltas")
