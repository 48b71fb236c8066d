from pathlib import Path

import pytest

from remtta import apply_delta, load_delta, load_model
from remtta.models.tensor_files import state_sha256
from remtta.zero_shot import METHODS as ZERO_SHOT
from tests.command import remtta_here
from tests.conftest import draw_folder
from tests.records import json_of, record_of, rows_of
from tests.zero_shot.tiny_clip import tiny_clip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A domain of two classes of four images, beside a model."""
    tiny_clip(tmp_path / "model")
    for number, folder in enumerate(("green_frog", "ship")):
        draw_folder(tmp_path / "data" / "fog" / folder, range(4 * number, 4 * number + 4))
    return tmp_path / "data"


def test_an_evaluation_takes_class_names_from_folders_and_its_delta_continues(data: Path, tmp_path: Path) -> None:
    name, out = f"clip:{tmp_path / 'model'}", tmp_path / "out"
    options = ["--model", name, "--prompts", "watt", "--batch-size", "4", "--quiet", "--no-plots"]
    assert remtta_here("eval", data, *options, "--methods", "source,rem", "--output", out) == 0
    settings = json_of(out / "results.json")["settings"]
    assert settings["model"]["labels"] == ["green frog", "ship"] and settings["model"]["prompts"] == "watt"
    assert settings["data"]["classes"] == "class name"
    (delta,) = (out / "deltas").glob("rem*.safetensors")
    frames, run, whole = data / "fog" / "ship", tmp_path / "run", tmp_path / "adapted.safetensors"
    assert remtta_here("adapt", frames, "--model", name, "--delta", delta, "--output", run) == 0
    assert {row["label"] for row in rows_of(run)} <= {"green frog", "ship"} and len(rows_of(run)) == 4
    assert remtta_here("apply", delta, "--model", name, "--output", whole) == 0
    given = {"labels": record_of(run)["model"]["labels"], "prompts": "watt"}
    first, second = load_model(name, **given), load_model(name, checkpoint=whole, **given)
    apply_delta(first, load_delta(delta))
    assert state_sha256(first) == state_sha256(second)


def test_methods_for_zero_shot_models_are_evaluated(data: Path, tmp_path: Path) -> None:
    model = f"clip:{tmp_path / 'model'}"
    options = ["--model", model, "--prompts", "watt", "--batch-size", "2", "--quiet", "--device", "cpu", "--lr", "0.01"]
    few = [f"--set={method}.{key}=1" for method in ("watt", "rem-watt") for key in ("rounds", "steps")]
    few += ["--set=clipartt.steps=1", "--set=tpt.num_views=3", "--limit=2", "--no-plots"]
    methods: list[str | Path] = ["--methods", ",".join(["source", *ZERO_SHOT]), "--output", tmp_path / "out"]
    assert remtta_here("eval", data, *options, *few, *methods) == 0
    assert list(json_of(tmp_path / "out" / "results.json")["settings"]["methods"]) == ["source", *ZERO_SHOT]
    assert not any((tmp_path / "out" / "deltas").glob("tpt*"))
