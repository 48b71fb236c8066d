"""The output of inspect for runs and evaluations, and for invalid files."""

import contextlib
import copy
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from remtta import adapt_stream, load_delta
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.methods.table import method_config
from remtta.options import RunOptions
from tests.command import remtta_here
from tests.conftest import draw_folder, tiny_vit
from tests.lab.evaluation.trees import write_tree
from tests.records import lines_of, record_of
from tests.runs.tiny import adapt_tiny

ESCAPE = "\x1b]0;stolen\x07\x1b[31m"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    adapt_stream(tiny_vit(), draw_folder(folder / "frames", range(6)), folder / "run", options=RunOptions(batch_size=3))
    return folder / "run"


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    dataset = open_dataset(write_tree(folder / "tree"), num_classes=7, labels=None, severities=[5], limit=7)
    methods = {name: method_config(name, {}, batch_size=4) for name in ("source", "rem")}
    evaluate(tiny_vit(), dataset, folder / "out", methods=methods, options=EvalOptions(batch_size=4, seeds=(0, 1)))
    return folder / "out"


def told(path: Path, *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of inspect."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = remtta_here("inspect", path, *args)
    return code, out.getvalue(), err.getvalue()


def test_a_run_that_adapts_nothing_has_no_rate_and_no_adapted_model(tmp_path: Path) -> None:
    adapt_tiny(draw_folder(tmp_path / "frames", range(3)), tmp_path / "run", "source")
    lines = told(tmp_path / "run")[1].splitlines()
    method, guard = (next(line for line in lines if line.startswith(name)) for name in ("method", "guard"))
    assert "lr" not in method and guard.split() == ["guard", "none"]


def test_the_adapted_models_lead_and_estimated_accuracies_are_shown(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    assert "lead" in record["guard"] and "\naccuracy " not in told(run)[1]
    record["guard"]["lead"], record["accuracy"] = -0.123, {"last": {"source": 0.614, "adapted": 0.678}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    out = told(tmp_path)[1]
    assert ", lead -12 %, 0 alarms, " in out
    assert "\naccuracy     of the last frames, estimated: not known yet; cannot tell whether adaptation helps\n" in out


def check_told(path: Path) -> None:
    """Whatever a folder holds, inspect shows it or says in one line what is wrong, and passes nothing raw on."""
    for args in ((), ("--json",)):
        code, out, err = told(path, *args)
        assert code in (0, 1, 2, 4)
        assert out.replace("\n", "").isprintable()
        if code:
            assert out == "" and err.startswith("Error: ") and err.count("\n") == 1 and err[:-1].isprintable()
            assert "--debug" not in err, err
        else:
            assert err == ""


def test_a_stream_of_few_classes_that_is_hardly_centered_is_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames, one, two = draw_folder(tmp_path / "frames", range(6)), torch.tensor(1.0), torch.tensor(2.0)
    monkeypatch.setattr("remtta.pipeline.few_classes.evidence_of_few", lambda *_: -one)
    adapt_stream(tiny_vit(), frames, tmp_path / "many", method="fast", options=RunOptions(batch_size=3))
    monkeypatch.setattr("remtta.pipeline.few_classes.evidence_of_few", lambda *_: two)
    monkeypatch.setattr("remtta.pipeline.few_classes.fraction_unknown", lambda *_: one)
    for method in ("fast", "remtta"):
        folder = tmp_path / method
        adapt_stream(tiny_vit(), frames, folder, method=method, options=RunOptions(batch_size=3))
        (event,) = lines_of(folder / "events.jsonl")
        assert event["event"] == "uncentered" and event["frame"] == 0 and event["subtracted"] == 0
        assert record_of(folder)["centering"] == {"few_classes": 1.0, "uncentered": True, "times_uncentered": 1}
        assert "1 time mostly left out for few classes, and still at the end" in told(folder)[1]
    assert record_of(tmp_path / "many")["centering"]["times_uncentered"] == 0
    assert "left out for few classes" not in told(tmp_path / "many")[1]


def test_layers_moved_as_far_as_the_delta_says(run: Path) -> None:
    content = json.loads(told(run / "delta.safetensors", "--json")[1])["delta"]
    delta = load_delta(run)
    assert content["model_options"] == delta.model_options and content["hyperparameters"] == delta.hyperparameters
    for layer in content["layers"]:
        parts = [tensor.numpy().ravel() for name, tensor in delta.tensors.items() if name.startswith(layer["layer"])]
        change = np.concatenate(parts).astype(np.float64)
        assert layer["rms"] == pytest.approx(np.sqrt((change**2).mean()), rel=1e-12)
        assert layer["max"] == np.abs(change).max()


def test_an_evaluation_is_shown_with_its_results(evaluation: Path, tmp_path: Path) -> None:
    code, out, _ = told(evaluation)
    results = json.loads((evaluation / "results.json").read_text())
    rem = results["methods"]["rem"]
    assert code == 0
    assert out.startswith("evaluation   completed; continual, batch 4, seeds 0,1 on cpu\ndata         ")
    assert "methods      source, rem\n" in out
    assert rem["gain"] == 0  # which is no significant gain
    assert f"\nrem         ≈{rem['mean']:.1f} ± {rem['mean_std']:.1f}  ≈+0.0  {100 * rem['ece']:5.1f}\n" in out
    content = json.loads(told(evaluation, "--json")[1])
    assert content["evaluation"]["methods"]["rem"]["mean"] == rem["mean"]
    assert content["evaluation"]["settings"] == results["settings"] and content["alive"] is False
    code, _, err = told(evaluation.parent.parent)
    assert code == 2 and "holds no run (no run.json) and no evaluation (no results.json)" in err
    assert f"there are runs in {evaluation}" in told(evaluation.parent)[2]
    del results["methods"]
    (tmp_path / "results.json").write_text(json.dumps({**results, "status": "running"}))
    out = told(tmp_path)[1]
    assert out.startswith("evaluation   was stopped; --resume continues it; ") and "; no results yet\n" in out


def header_of(path: Path) -> dict[str, str]:
    """A delta's header, without a checksum."""
    with safe_open(path, framework="np") as file:
        return {key: value for key, value in file.metadata().items() if key != "content_sha256"}


def test_control_characters_in_a_header_are_escaped(run: Path, tmp_path: Path) -> None:
    delta, path = run / "delta.safetensors", tmp_path / "delta.safetensors"
    texts = dict.fromkeys(("model", "method", "created", "base_sha256", "remtta_version"), ESCAPE)
    save_file(load_file(delta), path, header_of(delta) | texts)
    code, out, _ = told(path)
    assert code == 0 and "\x1b" not in out and r"\x1b[31m" in out
    shutil.copytree(run, tmp_path / "run")
    record = record_of(run)
    record["environment"]["device"] = record["method"]["name"] = record["exit_reason"] = ESCAPE
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    check_told(tmp_path / "run")
    save_file({f"{ESCAPE}.weight": np.ones(3, np.float32)}, tmp_path / "names.safetensors", header_of(path))
    check_told(tmp_path / "names.safetensors")


def test_rows_that_were_lost_are_reported(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    rows = (run / "predictions.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "predictions.jsonl").write_text("".join(rows[:2]))
    assert f"run.json counts {len(rows)}, so rows were lost or added" in told(tmp_path / "run")[1]
    assert "lost" not in told(run)[1]


TEXTS = st.text(max_size=5) | st.sampled_from([ESCAPE, "", "\ud800", "\u2028", "x" * 100_000])
NUMBERS = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats()
VALUES = NUMBERS | TEXTS | st.lists(st.integers(), max_size=2) | st.dictionaries(TEXTS, st.integers(), max_size=2)


def mutated(data: st.DataObject, content: Any) -> str:
    """A record in which a few things are other ones, or gone."""
    changed = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        inner, key = changed, data.draw(st.sampled_from(sorted(changed)))
        while isinstance(inner[key], (dict, list)) and inner[key] and data.draw(st.booleans()):
            inner = inner[key]
            key = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        if data.draw(st.booleans()):
            inner[key] = data.draw(VALUES)
        else:
            del inner[key]
        if not changed:
            break
    return json.dumps(changed)


@settings(max_examples=settings().max_examples // 2)  # each is shown twice
@given(data=st.data())
@pytest.mark.parametrize("kind", ["run", "evaluation"])
def test_no_record_makes_it_fail(kind: str, data: st.DataObject, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    path = folder / ("run.json" if kind == "run" else "results.json")
    whole = path.read_text()
    try:
        path.write_text(mutated(data, json.loads(whole)))
        check_told(folder)
    finally:
        path.write_text(whole)


FIELDS = ["format_version", "model", "base_sha256", "method", "frames", "updates", "created", "hyperparameters"]
HEADER_TEXTS = st.text(max_size=5) | st.sampled_from([ESCAPE, "1", "{}", "[]", "NaN", "9" * 5000, "[" * 50_000])


@settings(max_examples=settings().max_examples // 2)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), HEADER_TEXTS),
    values=st.lists(st.floats(width=32), max_size=3),
    name=st.text(max_size=4) | st.sampled_from(["blocks." + "9" * 5000, ESCAPE]),
    kind=st.sampled_from(["float32", "float64", "float16", "int64", "bool"]),
)
def test_no_delta_makes_it_fail(changes: dict[str, str], values: list[float], name: str, kind: str, run: Path) -> None:
    path = run.parent / "mutated.safetensors"
    with np.errstate(all="ignore"):
        array = np.array(values).astype(kind)
    save_file({name: array}, path, header_of(run / "delta.safetensors") | changes)
    check_told(path)


@pytest.mark.parametrize("content", [b"[1]", b"\xff\xfe", b"[" * 100_000, b"{}"])
@pytest.mark.parametrize("name", ["run.json", "results.json"])
def test_an_invalid_record_is_reported(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    code, _, err = told(tmp_path)
    place = tmp_path if content == b"{}" else tmp_path / name  # an entry is missing, or the file is no record
    assert code == 1 and f"{place} is damaged (" in err
    check_told(tmp_path)
