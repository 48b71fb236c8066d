"""What the precision "auto" is, on processors that tests set."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import remtta
from remtta.lab.bench import run_bench
from remtta.lab.bench_options import BenchOptions
from remtta.lab.tables import notes
from remtta.models.precision import multiplies_bf16
from remtta.options import ModelOptions
from remtta.pipeline import build, precision
from tests.backbones.tiny_models import tiny
from tests.command import remtta_here
from tests.conftest import TINY, TINY_OPTIONS, tiny_vit
from tests.lab.evaluation.trees import evaluate_tiny, open_tree, write_tree
from tests.records import assert_same_results, json_of, record_of
from tests.runs.tiny import adapt_tiny, stop_after

SetNative = Callable[[bool], None]
"""Sets whether the processor multiplies bf16."""


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> SetNative:
    precision._log_bf16.cache_clear()

    def set_native(value: bool) -> None:
        for module in (precision, build):
            monkeypatch.setattr(module, "multiplies_bf16", lambda device: value)

    return set_native


@pytest.mark.parametrize(
    ("method", "settings", "chosen"),
    [
        *((method, {}, "bf16") for method in ("remtta", "fast")),
        *((method, {}, "fp32") for method in ("rem", "rem-n1", "tent", "source")),
        *(("remtta", {"precision": name}, name) for name in ("fp32", "bf16")),
    ],
)
def test_our_methods_take_bf16_if_the_processor_has_it(
    method: str, settings: dict[str, Any], chosen: str, native: SetNative
) -> None:
    native(True)
    pipeline = remtta.Adapter(tiny_vit(), method, **settings).pipeline
    assert pipeline.method.config.precision == pipeline.method.model.precision == chosen


def test_other_processors_compiled_models_and_convolutions_stay_in_fp32(native: SetNative) -> None:
    compiled: Any = tiny_vit()
    compiled.blocks[0]._compiled_call_impl = compiled.blocks[0]._call_impl  # as torch.compile leaves it
    for model, has_bf16 in ((tiny_vit(), False), (compiled, True), (tiny("resnet"), True)):
        native(has_bf16)
        assert remtta.Adapter(model).config.precision == "fp32"


def test_native_bf16_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert multiplies_bf16(torch.device("cpu")) and not multiplies_bf16(torch.device("mps"))
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not multiplies_bf16(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    assert not multiplies_bf16(torch.device("cuda"))


auto = partial(adapt_tiny, method="remtta", config={"lr": 0.01})


@pytest.mark.parametrize("first", [True, False])
def test_a_resumed_run_and_a_delta_keep_the_choice(
    first: bool, frames: Path, tmp_path: Path, native: SetNative, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    native(first)
    auto(frames, tmp_path / "whole")
    chosen = "bf16" if first else "fp32"
    remtta.Adapter(tiny_vit(), "fast")
    assert sum(message.startswith("precision bf16, ") for message in caplog.messages) == first  # once
    stop_after(2, frames, tmp_path / "parts", "remtta", config={"lr": 0.01})
    native(not first)
    auto(frames, tmp_path / "parts", resume=True)
    assert_same_results(tmp_path / "parts", tmp_path / "whole")
    delta = remtta.load_delta(tmp_path / "parts")
    assert record_of(tmp_path / "parts")["method"]["precision"] == delta.hyperparameters["precision"] == chosen
    native(True)
    auto(frames, tmp_path / "again", delta=delta)
    assert record_of(tmp_path / "again")["method"]["precision"] == chosen
    native(False)
    auto(frames, tmp_path / "elsewhere", delta=delta)
    assert record_of(tmp_path / "elsewhere")["method"]["precision"] == "fp32"


def test_all_rows_of_a_table_have_one_precision_unless_told_otherwise(tmp_path: Path, native: SetNative) -> None:
    tree, methods = open_tree(write_tree(tmp_path / "tree", ("fog",), each=1)), ("source", "remtta", "fast", "tent")
    run = partial(evaluate_tiny, tree, tmp_path / "eval", batch_size=4)
    native(True)
    settings = run(methods, seeds=(0, 1))["settings"]["methods"]
    assert {name: used["precision"] for name, used in settings.items()} == dict.fromkeys(methods, "fp32")
    delta = remtta.load_delta(tmp_path / "eval" / "deltas" / "remtta_seed1.safetensors")
    assert delta.hyperparameters["precision"] == "fp32"
    more = {**dict.fromkeys(methods), "low=remtta": {"precision": "bf16"}}
    results = run(more, seeds=(0, 1), resume=True)
    assert results["settings"]["methods"]["low=remtta"]["precision"] == "bf16"
    assert "bf16 matrix products in low=remtta" in notes(results)


def test_an_evaluation_of_an_earlier_version_goes_on_in_fp32(tmp_path: Path, native: SetNative) -> None:
    tree, record = open_tree(write_tree(tmp_path / "tree", ("fog",), each=1)), tmp_path / "eval" / "results.json"
    run = partial(evaluate_tiny, tree, tmp_path / "eval", batch_size=4)
    native(False)
    run(("remtta", "tent"))
    record.write_text(record.read_text().replace('"precision": "fp32"', '"precision": "auto"'))
    native(True)
    run(("remtta", "tent", "source"), resume=True)
    assert {used["precision"] for used in json_of(record)["settings"]["methods"].values()} == {"fp32"}


def test_bench_shows_the_precision(native: SetNative, capfd: pytest.CaptureFixture[str]) -> None:
    native(True)
    model = ModelOptions("vit_tiny_patch16_224", model_kwargs=TINY)
    options = BenchOptions(model, batch_size=2, repeats=1, subjects=("tent", "remtta"), memory=False)
    measured = {each.subject: each.precision for each in run_bench(options)}
    assert measured == {"forward": "fp32", "tent": "fp32", "remtta": "bf16"}
    methods = ["-b", "2", "--repeats", "1", "--no-memory", "--methods", "tent,remtta"]
    assert remtta_here("bench", *TINY_OPTIONS[:-2], *methods) == 0
    assert [line[:11].strip() for line in capfd.readouterr().out.splitlines()[2:]] == ["forward", "tent", "remtta bf16"]
