import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from remtta.errors import UsageError
from remtta.lab.bench import measure_peak, prepare, run_bench
from remtta.lab.bench_options import FORWARD, SUBJECTS, BenchOptions
from remtta.methods.settings.rem_config import REMConfig
from remtta.options import ModelOptions
from tests.command import remtta_here
from tests.conftest import NUM_CLASSES, TINY, TINY_OPTIONS
from tests.zero_shot.tiny_clip import tiny_clip

TINY_MODEL = ModelOptions("vit_tiny_patch16_224", model_kwargs=TINY)


def test_every_subject_is_timed_against_a_plain_forward_pass() -> None:
    options = BenchOptions(TINY_MODEL, batch_size=4, repeats=1, memory=False)
    measured = {each.subject: each for each in run_bench(options)}
    assert list(measured) == list(SUBJECTS)
    assert measured[FORWARD].forwards == 1
    assert measured["rem"].forwards > measured[FORWARD].forwards
    assert all(each.cpu_s_per_1000 > 0 and each.images_per_s == 4 / each.seconds for each in measured.values())


def test_rem_has_the_mask_ratios_asked_for() -> None:
    options = BenchOptions(TINY_MODEL, batch_size=4, mask_ratios=(0.0, 0.5))
    method = prepare("rem", options).method
    assert method and isinstance(method.config, REMConfig) and method.config.mask_ratios == (0.0, 0.5)


def test_peak_memory_is_that_over_the_loaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = multiprocessing.get_context("forkserver")  # of a process that has imported torch
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: forks)
    assert measure_peak("rem", BenchOptions(TINY_MODEL, batch_size=16)) > 2**20


def test_the_command_prints_a_table_or_json(capfd: pytest.CaptureFixture[str]) -> None:
    options = [*TINY_OPTIONS[:-2], "-b", "2", "--repeats", "1", "--no-memory"]
    assert remtta_here("bench", *options, "--methods", "rem,tent") == 0
    captured = capfd.readouterr()
    lines = captured.out.splitlines()
    assert "warming up tent\nround 1 of 1\n" in captured.err
    assert "core" in lines[0] and "PyTorch uses" in lines[0]
    assert lines[1].split() == ["ms/step", "forwards", "images/s", "CPU", "s/1k", "peak", "MiB"]
    assert [line.split()[0] for line in lines[2:]] == ["forward", "rem", "tent"]
    assert remtta_here("bench", *options, "--methods", "rem", "--json") == 0
    content = json.loads(capfd.readouterr().out)
    assert [each["subject"] for each in content["measurements"]] == ["forward", "rem"]
    assert content["options"]["batch_size"] == 2
    assert {"cpu", "cores", "used_by_torch"} <= content["environment"].keys()


def test_a_checkpoint_is_measured_at_its_own_size(
    vit: nn.Module, checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kwargs = {name: value for name, value in TINY.items() if name != "img_size"}
    size = TINY["img_size"], TINY["img_size"]
    model = ModelOptions(
        "vit_tiny_patch16_224", checkpoint, num_classes=NUM_CLASSES, model_kwargs=kwargs, input_size=size
    )
    options, random = BenchOptions(model, batch_size=2), replace(model, checkpoint=None)
    own = vit.state_dict()["head.weight"]
    assert torch.equal(prepare("tent", options).model.get_parameter("head.weight"), own)
    models = [prepare("tent", replace(options, model=random, seed=seed)).model for seed in (0, 0, 1)]
    heads = [model.get_parameter("head.weight") for model in models]
    assert heads[0].shape == own.shape
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    quick = ["-b", "2", "--repeats", "1", "--no-memory", "--methods", "source", "--json"]
    size_and_seed = ["--input-size", "32", "32", "--seed", "3"]
    assert remtta_here("bench", *TINY_OPTIONS[:-2], "--checkpoint", checkpoint, *size_and_seed, *quick) == 0
    content = json.loads(capfd.readouterr().out)["options"]
    assert (content["checkpoint"], content["seed"], content["input_size"]) == (str(checkpoint), 3, [32, 32])


def test_the_methods_are_compiled_and_what_they_are_compared_with_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **_: compiled.append(self))
    options = BenchOptions(TINY_MODEL, batch_size=2, compile=True)
    prepare(FORWARD, options)
    assert compiled == []
    assert prepare("tent", options).model.get_submodule("blocks.0") in compiled


def test_a_convolutional_model_is_measured() -> None:
    options = BenchOptions(
        ModelOptions("test_resnet", input_size=(64, 96)), batch_size=2, repeats=1, memory=False, subjects=("rem",)
    )
    assert [each.subject for each in run_bench(options)] == [FORWARD, "rem"]
    embedded = replace(options, model=ModelOptions("remtta-demo"))
    assert [each.subject for each in run_bench(embedded)] == [FORWARD, "rem"]


def test_zero_shot_models_are_measured_with_imagenets_classes(tmp_path: Path) -> None:
    name, _ = tiny_clip(tmp_path / "model")
    options = BenchOptions(ModelOptions(name), batch_size=2, repeats=1, memory=False, subjects=("source", "rem"))
    assert [each.subject for each in run_bench(options)] == [FORWARD, "source", "rem"]
    assert prepare(FORWARD, options).model.num_classes == 1000
    with pytest.raises(UsageError, match="takes no --num-classes"):
        prepare(FORWARD, replace(options, model=ModelOptions(name, num_classes=3)))
