"""Every command takes an ONNX file, and what it writes is as with torch."""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from remtta import Adapter, RunOptions, adapt_stream, apply_delta, load_base, load_delta, load_model, stream
from remtta.deployment.publishing import ModelPublisher
from remtta.errors import OutputError, UsageError
from remtta.formats.onnx_model import OnnxClassifier
from remtta.options import GuardOptions
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder, raising, random_images, same_tensors, tiny_vit
from tests.formats.tiny_onnx import write_onnx
from tests.lab.evaluation.trees import write_tree
from tests.test_files import killed_while_writing


def rows(folder: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, 12 frames, and a run over them."""
    folder = tmp_path_factory.mktemp("onnx")
    write_onnx(folder / "tiny.onnx")
    draw_folder(folder / "frames", range(12), "frame_{:02}.png")
    assert adapt(folder, "run") == 0
    return folder


def adapt(place: Path, output: str, *more: str | Path) -> int:
    options: list[str | Path] = [
        "--model",
        place / "tiny.onnx",
        "--batch-size",
        "4",
        "--logits",
        "--output",
        place / output,
    ]
    return remtta_here("adapt", place / "frames", *options, *more)


def test_a_run_with_fast_by_default(made: Path) -> None:
    record = json.loads((made / "run" / "run.json").read_text())
    assert record["method"]["name"] == "fast" and record["counts"]["updates"] == 3
    assert record["model"]["name"] == "tiny.onnx" and record["model"]["provider"] == "CPUExecutionProvider"
    assert [row["update"] for row in rows(made / "run")] == [0] * 4 + [1] * 4 + [2] * 4
    delta = load_delta(made / "run")
    assert list(delta.tensors) == ["head.bias"] and delta.tensors["head.bias"].any()
    base = load_base(delta)
    apply_delta(base, delta)
    assert torch.equal(base.state_dict()["head.bias"], delta.tensors["head.bias"])


def test_a_resumed_run_is_the_same_bit_for_bit(made: Path) -> None:
    assert adapt(made, "part", "--limit", "8", "--smooth", "auto", "--estimate", "0.8") == 0
    assert adapt(made, "part", "--resume", "--smooth", "auto", "--estimate", "0.8") == 0
    assert adapt(made, "whole", "--smooth", "auto", "--estimate", "0.8", "--health", made / "health.json") == 0
    assert rows(made / "part") == rows(made / "whole")
    for name in ("delta", "state"):
        first, second = (load_file(made / run / f"{name}.safetensors") for run in ("part", "whole"))
        assert same_tensors({k: v for k, v in first.items() if v.ndim}, {k: v for k, v in second.items() if v.ndim})
    assert json.loads((made / "health.json").read_text())["frames"] == 12


def test_an_applied_delta_predicts_as_the_adapted_model(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("apply", made / "run", "-o", made / "adapted.onnx") == 0
    use = f"predict with it: remtta adapt FRAMES --model {made / 'adapted.onnx'} --method source"
    assert capfd.readouterr().err.splitlines()[-1] == use
    assert remtta_here("export", made / "run", "-f", "onnx", "-o", made / "exported") == 0
    assert (made / "adapted.onnx").read_bytes() == (made / "exported" / "model.onnx").read_bytes()
    told = {entry.key: entry.value for entry in onnx.load(made / "adapted.onnx").metadata_props}
    assert told["method"] == "fast" and told["frames"] == "12"
    assert json.loads(told["preprocessing"])["input_size"] == [32, 32]
    assert adapt(made, "continued", "--delta", made / "run", "--method", "source") == 0
    shutil.copy(made / "adapted.onnx", made / "tiny2.onnx")
    options: list[str | Path] = ["--method", "source", "--logits", "-b", "4", "-o", made / "applied"]
    assert remtta_here("adapt", made / "frames", "--model", made / "tiny2.onnx", *options) == 0
    for first, second in zip(rows(made / "continued"), rows(made / "applied"), strict=True):
        torch.testing.assert_close(Tensor(first["logits"]), Tensor(second["logits"]), atol=1e-4, rtol=0)
    capfd.readouterr()
    assert remtta_here("inspect", made / "run") == 0
    assert "largest changes of the bias: class " in capfd.readouterr().out


def test_refusals_are_one_line_and_write_nothing(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given: list[str | Path] = ["adapt", made / "frames", "-o", made / "nothing", "--model"]
    write_onnx(made / "boxes.onnx", end="detector")
    (made / "damaged.onnx").write_bytes(b"no model")
    refused: list[tuple[str, list[str | Path], int, str]] = [
        ("boxes.onnx", [], 4, "as a classifier has"),
        ("damaged.onnx", [], 4, "not a readable ONNX file"),
        ("missing.onnx", [], 2, "no such model file"),
        ("tiny.onnx", ["--method", "tent"], 2, "use the method fast, center, source or lame"),
        ("tiny.onnx", ["--checkpoint", made / "x.pth"], 2, "leave --checkpoint out"),
        ("vit_tiny_patch16_224", ["--checkpoint", made / "tiny.onnx"], 2, "name it with --model"),
        ("remtta-demo", ["--provider", "cpu"], 2, "--provider: only for an ONNX file, and the model is remtta-demo"),
    ]
    for name, more, code, text in refused:
        assert text in refusal_of(capfd, *given, made / name if name.endswith("x") else name, *more, code=code)
        assert not (made / "nothing").exists()
    write_onnx(made / "other.onnx", end="MatMul")
    target: list[str | Path] = ["-o", made / "new.onnx"]
    assert "other weights" in refusal_of(capfd, "apply", made / "run", "--model", made / "other.onnx", *target, code=4)
    assert "--output adapted.onnx" in refusal_of(capfd, "apply", made / "run", "-o", made / "new.safetensors")
    assert "use --format onnx" in refusal_of(capfd, "export", made / "run", "-f", "timm", "-o", made / "new")


def test_what_is_guessed_of_the_preprocessing_is_told(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    crop, statistics = "--interpolation bicubic --crop-pct 0.875", ["--mean", "0.5", "--std", "0.5"]
    write_tree(made / "guessed", ["fog"])
    commands: list[list[str | Path]] = [
        ["adapt", made / "frames", "--overwrite", "-o", made / "guess"],
        ["doctor", made / "guessed"],
        ["eval", made / "guessed", "--methods", "source", "--no-plots", "--resize", "always", "-o", made / "guesses"],
    ]
    for words in commands:
        assert remtta_here(*words, "--model", made / "tiny.onnx", *statistics) in (0, 3)
        assert f"preprocessing is partly unknown: assuming {crop}; set the values" in capfd.readouterr().err
    assert adapt(made, "guess", "--overwrite", *statistics, *crop.split()) == 0
    assert "unknown" not in capfd.readouterr().err


def test_eval_doctor_bench_and_many_streams(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model: list[str | Path] = ["--model", made / "tiny.onnx"]
    write_tree(made / "tree", ["fog"])
    assert remtta_here("eval", made / "tree", *model, "-o", made / "table", "--no-plots") == 0
    results = json.loads((made / "table" / "results.json").read_text())["methods"]
    assert list(results) == ["source", "fast"] and results["fast"]["forwards_per_image"] < 1.08
    capfd.readouterr()
    assert remtta_here("doctor", made / "tree", *model) in (0, 3)
    assert "method   fast: center, with recent statistics" in capfd.readouterr().out
    assert remtta_here("bench", *model, "-b", "2", "--repeats", "1", "--no-memory", "--json") == 0
    measured = json.loads(capfd.readouterr().out)["measurements"]
    assert [each["subject"] for each in measured] == ["forward", "source", "fast"]
    (made / "cams.txt").write_text(f"a={made / 'frames'}\nb={made / 'frames'}\n")
    options: list[str | Path] = [*model, "--streams", "-b", "4", "--logits", "-o", made / "site"]
    assert remtta_here("adapt", made / "cams.txt", *options) == 0
    assert rows(made / "site" / "b") == rows(made / "run")


def test_an_adapter_of_a_file_and_its_stream(made: Path) -> None:
    adapter = Adapter(str(made / "tiny.onnx"), batch_size=4)
    results = list(stream(made / "frames", adapter))
    assert [result.class_id for result in results] == [row["class"] for row in rows(made / "run")]
    assert torch.equal(adapter.delta()["head.bias"], load_delta(made / "run").tensors["head.bias"])
    again = Adapter(load_model(str(made / "tiny.onnx")), batch_size=4)
    again.load_state_dict(adapter.state_dict())
    assert torch.equal(again(random_images(4)), adapter(random_images(4)))


# Publishing


def publish(made: Path, path: Path, every: str = "1", **options: Any) -> None:
    model = options.pop("model", None) or load_model(str(made / "tiny.onnx"))
    publisher = ModelPublisher(path, every)
    run = RunOptions(batch_size=4, overwrite=True, **options)
    adapt_stream(model, made / "frames", path.parent / "run", options=run, callbacks=[publisher])


def test_a_file_is_replaced_and_a_folder_gets_versions(made: Path, tmp_path: Path) -> None:
    publish(made, tmp_path / "live.onnx")
    published = load_model(str(tmp_path / "live.onnx"))
    assert isinstance(published, OnnxClassifier)
    model = load_model(str(made / "tiny.onnx"))
    apply_delta(model, load_delta(tmp_path / "run"))
    torch.testing.assert_close(published(random_images(3)), model(random_images(3)))
    publish(made, tmp_path / "models")
    assert sorted(map(str, (tmp_path / "models").rglob("*"))) == [
        str(tmp_path / "models" / name) for name in (".published.json", "2", "2/model.onnx", "3", "3/model.onnx")
    ]
    assert (tmp_path / "models/3/model.onnx").read_bytes() == (tmp_path / "live.onnx").read_bytes()
    publish(made, tmp_path / "delta.safetensors", "100")  # at the end in any case
    assert same_tensors(load_delta(tmp_path / "delta.safetensors").tensors, load_delta(tmp_path / "run").tensors)


def test_the_next_run_removes_old_versions_of_a_killed_one_and_no_others(made: Path, tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("1", "7", "7\u00b2", "007", ".8"):  # the user's, not versions, and what a kill may leave
        (models / name).mkdir(parents=True)
        (models / name / "model.onnx").write_bytes(b"a user's")
    killed_while_writing(models / ".model.onnx")
    publish(made, models)
    assert names(models) == {"1", "7", "7\u00b2", "007", "9", "10"}
    publish(made, models, "100", model=load_model(str(models / "9" / "model.onnx")))
    assert names(models) == {"1", "7", "7\u00b2", "007", "9", "10", "11"}  # 9 is the run's own model
    publish(made, models, "100")
    assert names(models) == {"1", "7", "7\u00b2", "007", "11", "12"}
    assert (models / "7" / "model.onnx").read_bytes() == b"a user's"
    (models / ".published.json").write_text("{}")
    with pytest.raises(UsageError, match=r"\.published\.json is damaged"):
        publish(made, models)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".published.json"}


def test_the_models_own_file_is_not_replaced(made: Path, tmp_path: Path) -> None:
    own, link = Path(shutil.copy(made / "tiny.onnx", tmp_path / "own.onnx")), tmp_path / "link.onnx"
    link.symlink_to(own)
    for path in (own, link):
        with pytest.raises(UsageError, match=f"--publish {path} would replace its own input .*own.onnx; choose"):
            publish(made, path, model=load_model(str(own)))
    assert own.read_bytes() == (made / "tiny.onnx").read_bytes()


def test_onnx_of_a_torch_model_needs_its_packages_at_the_start(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    with pytest.raises(UsageError, match="needs onnxscript, which is not installed: pip install"):
        publish(made, tmp_path / "live.onnx", model=tiny_vit())
    publish(made, tmp_path / "live.onnx")  # an ONNX file is rewritten without it
    assert names(tmp_path) == {"live.onnx", "run"}


def test_a_checkpoint_of_torch_has_the_adapted_weights(made: Path, tmp_path: Path) -> None:
    model = tiny_vit()
    publish(made, tmp_path / "live.safetensors", model=model)
    expected = tiny_vit()
    apply_delta(expected, load_delta(tmp_path / "run"))
    assert same_tensors(load_file(tmp_path / "live.safetensors"), expected.state_dict())


def test_a_doubted_model_is_not_published(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remtta.pipeline.guard.Guard.state", "doubt")
    publish(made, tmp_path / "live.safetensors", model=tiny_vit(), guard=GuardOptions("rollback"))
    assert not (tmp_path / "live.safetensors").exists()


def test_after_the_last_alarm_the_source_weights_are_published(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drift = iter([0.0, 9.0])
    monkeypatch.setattr("remtta.models.weights.AdaptedWeights.drift", lambda self: next(drift, 0.0))
    guard = GuardOptions("rollback", retries=0)
    publish(made, tmp_path / "delta.safetensors", "100", model=tiny_vit(), guard=guard)
    tensors = load_delta(tmp_path / "delta.safetensors").tensors
    assert not any(tensor.any() for name, tensor in tensors.items() if name != "head.bias")


def test_a_failure_leaves_the_file_and_the_run_goes_on(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "live.onnx").write_bytes(b"earlier")
    monkeypatch.setattr(OnnxClassifier, "save", raising(OutputError("the disk is full")))
    with caplog.at_level(logging.WARNING):
        publish(made, tmp_path / "live.onnx")
    assert (tmp_path / "live.onnx").read_bytes() == b"earlier" and "not published: the disk is full" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["live.onnx", "run"]
    assert len(rows(tmp_path / "run")) == 12


def test_an_onnx_file_needs_neither_timm_nor_torchvision(made: Path, tmp_path: Path) -> None:
    adapt = ["adapt", made / "frames", "--model", made / "tiny.onnx", "--publish", tmp_path / "live.onnx"]
    code = f"""
import sys
import torch
from remtta import Adapter
from remtta.cli.application import app
from remtta.models.imagenet import names_of
for method in ("source", "fast", "center", "lame"):
    Adapter({str(made / "tiny.onnx")!r}, method)(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
app({[*map(str, adapt), "--output", str(tmp_path / "run")]}, standalone_mode=False)
names_of(1000)
print(sys.modules.keys() & {{"timm", "torchvision", "torch._dynamo"}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (tmp_path / "live.onnx").exists() and done.stdout.endswith("set()\n")


def test_publishing_by_time_and_what_is_refused(made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    publish(made, tmp_path / "live.onnx", "10m")
    assert (tmp_path / "live.onnx").exists()
    for path, every, text in (
        ("live.pth", "1", "must be a folder, or end in .onnx"),
        ("live.onnx", "0", "publish-every must be a number of updates"),
        ("live.onnx", "1h", "publish-every must be a number of updates"),
        ("live.safetensors", "1", "published as .onnx, or as its delta.safetensors"),
    ):
        with pytest.raises(UsageError, match=text):
            publish(made, tmp_path / path, every)
    (made / "one.txt").write_text(f"a={made / 'frames'}\n")
    options: list[str | Path] = [
        "--model",
        made / "tiny.onnx",
        "--streams",
        "--publish",
        tmp_path / "x.onnx",
        "-o",
        tmp_path / "s",
    ]
    assert "--publish is for one stream" in refusal_of(capfd, "adapt", made / "one.txt", *options)


def test_a_delta_without_its_run_and_a_file_that_is_no_delta_name_what_to_give(
    made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = Adapter(str(made / "tiny.onnx"))
    adapter(random_images(4))
    adapter.save_delta(made / "alone.safetensors")
    words: list[str | Path] = ["apply", made / "alone.safetensors", "-o", made / "alone.onnx"]
    assert "name them with --model" in refusal_of(capfd, *words)
    assert remtta_here(*words, "--model", made / "tiny.onnx") == 0
    assert "is a whole model; name a delta" in refusal_of(capfd, "inspect", made / "tiny.onnx")
