"""Deltas of methods that change every weight, from the run to the checkpoint."""

import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from remtta import RunOptions, adapt_stream, apply_delta, load_delta
from remtta.errors import UsageError
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.models.tensor_files import state_sha256
from tests.conftest import same_tensors, tiny_vit
from tests.lab.evaluation.trees import open_tree, write_tree

CHANGED: dict[str, dict[str, Any]] = {
    "cotta": {"lr": 0.05, "teacher_decay": 0.5, "augment_below": 0.0},
    "vida": {"lr": 0.05, "adapter_lr": 0.05, "high_rank": 4, "num_augmentations": 2},
    "continual-mae": {"lr": 0.01, "num_dropouts": 2},
}


def _run(model: nn.Module, frames: Path, output: Path, method: str, *, save_full: bool) -> None:
    config = method_config(method, CHANGED.get(method, {}), batch_size=5)
    options = RunOptions(batch_size=5, save_full=save_full, logits=True)
    adapt_stream(model, frames, output, method=method, config=config, options=options)


@pytest.mark.parametrize("method", CHANGED)
def test_a_full_delta_gives_back_what_predicts_bit_for_bit(method: str, frames: Path, tmp_path: Path) -> None:
    adapted, model = tiny_vit(), tiny_vit()
    _run(adapted, frames, tmp_path / "run", method, save_full=True)
    delta = load_delta(tmp_path / "run")
    every = {name for name, _ in model.named_parameters()}
    weights_and_biases = {name for name in every if name.endswith((".weight", ".bias"))}
    assert set(delta.tensors) == (weights_and_biases if method == "continual-mae" else every)
    assert (delta.method, delta.updates) == (method, 3)
    apply_delta(model, delta)
    assert state_sha256(model) == state_sha256(adapted) != state_sha256(tiny_vit())


def test_without_the_option_no_delta_is_written_and_one_line_says_so(
    frames: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "remtta"):
        _run(tiny_vit(), frames, tmp_path / "run", "cotta", save_full=False)
    assert not (tmp_path / "run" / "delta.safetensors").exists()
    assert len(caplog.messages) == 1
    assert "cotta changes every weight, so no delta.safetensors is written; --save-full" in caplog.text


@pytest.mark.parametrize("method", ["lame", "memo", "foa", "vdp", "neo"])
def test_a_method_without_a_change_to_save_refuses_to_save_one(method: str, frames: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"so --save-full has nothing to save; leave it out"):
        _run(tiny_vit(), frames, tmp_path / "run", method, save_full=True)
    assert not (tmp_path / "run").exists()


def test_a_method_that_changes_norms_saves_the_same_with_the_option(frames: Path, tmp_path: Path) -> None:
    for name, save_full in (("plain", False), ("full", True)):
        _run(tiny_vit(), frames, tmp_path / name, "tent", save_full=save_full)
    plain, full = load_delta(tmp_path / "plain").tensors, load_delta(tmp_path / "full").tensors
    assert same_tensors(plain, full)


def test_an_evaluation_leaves_the_model_and_only_small_deltas(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c", ["fog"], severities=(), each=1))
    small = {"memo": {"num_augmentations": 2}}
    names = ["tent", "cotta", "lame", "memo", "vida", "continual-mae", "vdp"]
    methods = {
        name: method_config(name, {**CHANGED.get(name, {}), **small.get(name, {})}, batch_size=4) for name in names
    }
    assert set(names) < set(METHOD_TABLE)
    model = tiny_vit()
    before = state_sha256(model)
    results = evaluate(model, dataset, tmp_path / "run", methods=methods, options=EvalOptions(batch_size=4))
    assert state_sha256(model) == before
    assert [path.name for path in (tmp_path / "run" / "deltas").iterdir()] == ["tent_seed0.safetensors"]
    assert [results["methods"][name]["forwards_per_image"] for name in names] == [1, 3, 1, 3, 4, 4, 2]
    assert [results["methods"][name]["models_held"] for name in names] == [1, 3, 1, 2, 2, 2, 1]
