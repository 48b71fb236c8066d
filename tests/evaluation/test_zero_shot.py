from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from remtta import apply_delta, load_delta, load_model
from remtta.methods.settings import ZERO_SHOT
from tests.command import remtta_here
from tests.conftest import draw_folder
from tests.models.tiny_clip import tiny_clip


def test_an_evaluation_takes_class_names_from_folders_and_its_delta_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, _ = tiny_clip(tmp_path / "model")
    for place, folder in enumerate(("green_frog", "ship")):
        draw_folder(tmp_path / "data" / "fog" / folder, range(4 * place, 4 * place + 4))
    options = ["--model", name, "--prompts", "watt", "--batch-size", "4", "--quiet", "--no-plots"]
    out = tmp_path / "out"
    assert remtta_here("eval", str(tmp_path / "data"), *options, "--methods", "source,rem", "--output", str(out)) == 0
    settings = json.loads((out / "results.json").read_text())["settings"]
    assert settings["model"]["labels"] == ["green frog", "ship"] and settings["model"]["prompts"] == "watt"
    assert settings["data"]["classes"] == "class name"
    (delta,) = (out / "deltas").glob("rem*.safetensors")
    frames = str(tmp_path / "data" / "fog" / "ship")
    assert remtta_here("adapt", frames, "--model", name, "--delta", str(delta), "--output", str(tmp_path / "run")) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "predictions.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} <= {"green frog", "ship"} and len(rows) == 4
    whole = tmp_path / "adapted.safetensors"
    assert remtta_here("apply", str(delta), "--model", name, "--output", str(whole)) == 0
    start = json.loads((tmp_path / "run" / "run.json").read_text())["model"]
    given = {"labels": start["labels"], "prompts": "watt"}
    first, second = load_model(name, **given), load_model(name, checkpoint=whole, **given)
    apply_delta(first, load_delta(delta))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_methods_for_zero_shot_models_are_evaluated_and_watt_starts_each_batch_at_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    name, _ = tiny_clip(tmp_path / "model")
    for place, folder in enumerate(("green_frog", "ship")):
        draw_folder(tmp_path / "data" / "fog" / folder, range(2 * place, 2 * place + 2))
    options = ["--model", name, "--prompts", "watt", "--batch-size", "2", "--quiet", "--device", "cpu", "--lr", "0.01"]
    few = [f"--set={method}.{key}=1" for method in ("watt", "rem-watt") for key in ("rounds", "steps")]
    few += ["--set=clipartt.steps=1", "--set=tpt.num_views=3"]
    names = ["source", *ZERO_SHOT]
    methods = ["--methods", ",".join(names), "--no-plots", "--output", str(tmp_path / "out")]
    assert remtta_here("eval", str(tmp_path / "data"), *options, *few, *methods) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["settings"]["methods"]) == names
    assert not any((tmp_path / "out" / "deltas").glob("tpt*"))
    frames, run = str(tmp_path / "data" / "fog" / "ship"), tmp_path / "run"
    labels = tmp_path / "names.txt"
    labels.write_text("green frog\nship\n")
    more = ["--labels", str(labels), "--method", "watt", "--set", "rounds=1", "--set", "steps=1", "--batch-size", "1"]
    assert remtta_here("adapt", frames, *options, *more, "--output", str(run)) == 0
    record = json.loads((run / "run.json").read_text())
    assert (
        (tmp_path / "run" / "delta.safetensors").exists()
        and record["method"]["episodic"] is True
        and record["counts"]["updates"] == 2
        and record["guard"] is None
    )
