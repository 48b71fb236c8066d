"""What the precision "auto" is, by times that tests set."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import remtta
from remtta.deployment.many_streams import adapt_streams
from remtta.lab.bench import run_bench
from remtta.lab.bench_options import BenchOptions
from remtta.methods.build import build_method
from remtta.models.precision import multiplies_bf16
from remtta.options import ModelOptions, RunOptions
from remtta.pipeline import build, precision
from remtta.pipeline.build import AdaptationConfig
from remtta.streams.sources import open_streams
from tests.command import remtta_here
from tests.conftest import TINY, TINY_OPTIONS, tiny_vit
from tests.lab.evaluation.trees import evaluate_tiny, open_tree, write_tree
from tests.records import assert_same_results, json_of, record_of
from tests.runs.tiny import adapt_tiny, stop_after

SetTimes = Callable[..., list[str]]
"""Sets the seconds of a forward pass in fp32 and in bf16; returns a list that gets the precision of each pass."""


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> SetTimes:
    def set_times(fp32: float, bf16: float, *, native: bool = True) -> list[str]:
        passes: list[str] = []

        def seconds(model: Any, images: Any, name: str) -> float:
            passes.append(name)
            return {"fp32": fp32, "bf16": bf16}[name]

        monkeypatch.setattr(precision, "seconds", seconds)
        for module in (precision, build):
            monkeypatch.setattr(module, "multiplies_bf16", lambda device: native)
        return passes

    return set_times


@pytest.mark.parametrize(
    ("method", "settings", "measured", "chosen"),
    [
        *((method, {}, (1.0, 0.79), "bf16") for method in ("remtta", "fast")),
        ("remtta", {}, (1.0, 0.81), "fp32"),
        ("remtta", {}, (0.0, 0.0), "fp32"),
        *((method, {}, None, "fp32") for method in ("rem", "rem-n1", "tent", "source")),
        *(("remtta", {"precision": name}, None, name) for name in ("fp32", "bf16")),
    ],
)
def test_our_methods_take_bf16_if_it_is_clearly_faster(
    method: str, settings: dict[str, Any], measured: Any, chosen: str, times: SetTimes
) -> None:
    passes = times(*(measured or (1.0, 0.1)))
    pipeline = remtta.Adapter(tiny_vit(), method, **settings).pipeline
    assert pipeline.method.config.precision == pipeline.method.model.precision == chosen
    assert passes == (["fp32", "bf16"] * 2 if measured else [])


def test_nothing_is_measured_without_native_bf16_or_for_a_compiled_model(times: SetTimes) -> None:
    compiled: Any = tiny_vit()
    compiled.blocks[0]._compiled_call_impl = compiled.blocks[0]._call_impl  # as torch.compile leaves it
    for model, native in ((tiny_vit(), False), (compiled, True)):
        passes = times(1.0, 0.1, native=native)
        assert remtta.Adapter(model).config.precision == "fp32" and not passes


def test_a_real_measurement_takes_one_thread_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "multiplies_bf16", lambda device: True)
    threads, seconds, seen = torch.get_num_threads(), precision.seconds, []

    def measured(*args: Any) -> float:
        seen.append((torch.get_num_threads(), taken := seconds(*args)))
        return taken

    monkeypatch.setattr(precision, "seconds", measured)
    torch.set_num_threads(2)
    try:
        method = build_method("remtta", tiny_vit())
        assert precision.faster_precision(method.model, (32, 32), 8) in ("fp32", "bf16")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert [used for used, _ in seen] == [1] * 4 and all(taken > 0 for _, taken in seen)
    assert not method.model.weights.drift()


def test_native_bf16_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True, raising=False)
    assert multiplies_bf16(torch.device("cpu")) and not multiplies_bf16(torch.device("mps"))
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert not multiplies_bf16(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *, including_emulation: including_emulation)
    assert not multiplies_bf16(torch.device("cuda"))


auto = partial(adapt_tiny, method="remtta", config={"lr": 0.01})


@pytest.mark.parametrize(("first", "then"), [(0.5, 2.0), (2.0, 0.5)])
def test_a_resumed_run_and_a_delta_keep_the_choice(
    first: float, then: float, frames: Path, tmp_path: Path, times: SetTimes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "remtta")
    times(1.0, first)
    auto(frames, tmp_path / "whole")
    chosen = "bf16" if first < then else "fp32"
    assert f"precision {chosen}: a forward pass takes 1000 ms in fp32, {1000 * first:.0f} in bf16" in caplog.messages
    stop_after(2, frames, tmp_path / "parts", "remtta", config={"lr": 0.01})
    passes = times(1.0, then)
    auto(frames, tmp_path / "parts", resume=True)
    assert_same_results(tmp_path / "parts", tmp_path / "whole")
    delta = remtta.load_delta(tmp_path / "parts")
    assert record_of(tmp_path / "parts")["method"]["precision"] == delta.hyperparameters["precision"] == chosen
    auto(frames, tmp_path / "again", delta=delta)
    assert record_of(tmp_path / "again")["method"]["precision"] == chosen
    assert not passes
    times(1.0, 0.1, native=False)
    auto(frames, tmp_path / "elsewhere", delta=delta)
    assert record_of(tmp_path / "elsewhere")["method"]["precision"] == "fp32"


def test_a_run_of_an_earlier_version_goes_on_in_fp32(frames: Path, tmp_path: Path, times: SetTimes) -> None:
    times(1.0, 2.0)
    auto(frames, tmp_path / "whole")
    stop_after(2, frames, tmp_path / "run", "remtta", config={"lr": 0.01})
    record = tmp_path / "run" / "run.json"
    record.write_text(record.read_text().replace('"precision": "fp32"', '"precision": "auto"'))
    times(1.0, 0.1)
    auto(frames, tmp_path / "run", resume=True)
    assert record_of(tmp_path / "run")["method"]["precision"] == "fp32"
    assert_same_results(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("jobs", [1, 2])
def test_streams_share_one_decision_also_in_workers(jobs: int, frames: Path, tmp_path: Path, times: SetTimes) -> None:
    passes = times(1.0, 0.1)  # in workers, which are other processes, it would be fp32
    streams = dict.fromkeys(("gate", "yard"), str(frames))
    setup = AdaptationConfig("remtta", options=RunOptions(batch_size=6))
    adapt_streams(tiny_vit(), open_streams(streams), tmp_path / "site", setup, jobs=jobs)
    assert {record_of(tmp_path / "site" / name)["method"]["precision"] for name in streams} == {"bf16"}
    assert len(passes) == 4


@pytest.mark.parametrize("engine", ["serial", "processes"])
def test_an_evaluation_decides_once_and_keeps_it(engine: str, tmp_path: Path, times: SetTimes) -> None:
    tree, methods = open_tree(write_tree(tmp_path / "tree", ("fog",), each=1)), ("source", "remtta", "fast", "tent")
    run = partial(evaluate_tiny, tree, tmp_path / "eval", batch_size=4, engine=engine)
    passes, bf16 = times(1.0, 0.1), {"source": "fp32", "remtta": "bf16", "fast": "bf16", "tent": "fp32"}
    settings = run(methods, seeds=(0, 1))["settings"]["methods"]
    assert {name: used["precision"] for name, used in settings.items()} == bf16
    assert len(passes) == 4
    assert (
        remtta.load_delta(tmp_path / "eval" / "deltas" / "remtta_seed1.safetensors").hyperparameters["precision"]
        == "bf16"
    )
    times(1.0, 2.0)
    more = run((*methods, "more=remtta"), seeds=(0, 1), resume=True)["settings"]["methods"]
    assert {name: used["precision"] for name, used in more.items()} == {**bf16, "more=remtta": "fp32"}


def test_an_evaluation_of_an_earlier_version_goes_on_in_fp32(tmp_path: Path, times: SetTimes) -> None:
    tree, record = open_tree(write_tree(tmp_path / "tree", ("fog",), each=1)), tmp_path / "eval" / "results.json"
    run = partial(evaluate_tiny, tree, tmp_path / "eval", batch_size=4)
    times(1.0, 2.0)
    run(("remtta", "tent"))
    record.write_text(record.read_text().replace('"precision": "fp32"', '"precision": "auto"'))
    times(1.0, 0.1)
    run(("remtta", "tent", "source"), resume=True)
    assert {used["precision"] for used in json_of(record)["settings"]["methods"].values()} == {"fp32"}


def test_bench_shows_the_precision(times: SetTimes, capfd: pytest.CaptureFixture[str]) -> None:
    times(1.0, 0.1)
    model = ModelOptions("vit_tiny_patch16_224", model_kwargs=TINY)
    options = BenchOptions(model, batch_size=2, repeats=1, subjects=("tent", "remtta"), memory=False)
    measured = {each.subject: each.precision for each in run_bench(options)}
    assert measured == {"forward": "fp32", "tent": "fp32", "remtta": "bf16"}
    methods = ["-b", "2", "--repeats", "1", "--no-memory", "--methods", "tent,remtta"]
    assert remtta_here("bench", *TINY_OPTIONS[:-2], *methods) == 0
    assert [line[:11].strip() for line in capfd.readouterr().out.splitlines()[2:]] == ["forward", "tent", "remtta bf16"]
