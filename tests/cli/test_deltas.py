"""Deltas from one command to the next: adapt, apply and inspect."""

import json
import os
from pathlib import Path

import pytest
import torch

from remtta import RunOptions, adapt_stream
from remtta.files import FolderLock
from tests.command import refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, TINY, TINY_OPTIONS, tiny_vit
from tests.records import record_of, rows_of


def test_a_run_with_class_names_is_inspected(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, labels = tmp_path / "run", tmp_path / "labels.txt"
    labels.write_text("".join(f"name {number}\r\n" for number in range(NUM_CLASSES)), newline="")
    options = [*TINY_OPTIONS, *f"--checkpoint {checkpoint} --labels {labels} --batch-size 5 --lr 0.01".split()]
    assert remtta_here("adapt", frames, *options, "--output", run, "--logits") == 0
    assert capfd.readouterr().out == ""
    rows = rows_of(run)
    assert len(rows) == 12
    for row in rows:
        best = torch.tensor(row["logits"]).softmax(0).topk(5)
        assert [entry["class"] for entry in row["topk"]] == best.indices.tolist()
        assert [entry["prob"] for entry in row["topk"]] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert [entry["label"] for entry in row["topk"]] == [f"name {number}" for number in best.indices.tolist()]
    assert remtta_here("inspect", run, "--json") == 0
    content = json.loads(capfd.readouterr().out)
    assert content["predictions"]["predicted"] == 12
    assert content["delta"]["parameters"] == 5 * 2 * 48 + NUM_CLASSES


def test_inspect_tells_a_killed_run_from_a_live_one(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    adapt_stream(tiny_vit(), frames, run, options=RunOptions(batch_size=4, max_ms=1e-3))
    record = (run / "run.json").read_text()
    (run / "run.json").write_text(record.replace('"exit_reason": "completed"', '"exit_reason": "running"'))
    lock = FolderLock(run)
    assert remtta_here("inspect", run) == 0
    told = capfd.readouterr().out
    assert told.startswith("run          running; started")
    assert "1 update; 8 only predicted\n" in told
    lock.release()
    assert remtta_here("inspect", run) == 0
    assert capfd.readouterr().out.startswith("run          was killed; --resume continues it; started")
    (run / "run.json").write_text(record)
    assert remtta_here("inspect", run, "--json") == 0
    assert json.loads(capfd.readouterr().out)["alive"] is False


def test_a_delta_brings_its_model_along(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", checkpoint, "-o", first, "-b", "4") == 0
    for start, *more in ((first,), (os.path.relpath(first), "--resume")):
        assert remtta_here("adapt", frames, "--delta", start, "-o", second, "-b", "4", *more) == 0
    assert rows_of(second)[0]["update"] == 3
    model = record_of(second)["model"]
    assert model["checkpoint"] == str(checkpoint)
    assert model["model_kwargs"] == TINY
    assert remtta_here("apply", second, "-o", tmp_path / "whole.safetensors", "--device", "cpu") == 0
    for needed in (checkpoint, second / "delta.safetensors"):
        before = needed.read_bytes()
        assert remtta_here("apply", second, "-o", needed, "--overwrite") == 2
        assert needed.read_bytes() == before
    out = "-o", tmp_path / "x.safetensors"
    line = refusal_of(capfd, "apply", second, "--model", "vit_small_patch16_224", *out, code=4)
    assert "the delta was made on vit_tiny_patch16_224, not on vit_small" in line
    assert "tpu" in refusal_of(capfd, "apply", second, *out, "--device", "tpu")

    start = second / "delta.safetensors"
    line = refusal_of(capfd, "adapt", frames, "--delta", start, "-o", second, "--overwrite")
    assert f"is in {second}, which --overwrite would replace" in line and start.exists()

    checkpoint.rename(tmp_path / "moved.safetensors")
    line = refusal_of(capfd, "apply", second, "-o", tmp_path / "again.safetensors")
    assert "which is not there; name that file with --checkpoint" in line


def test_a_delta_brings_its_preprocessing_and_names_its_checkpoint_from_anywhere(
    frames: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors", "--mean", "0.1", "0.2", "0.3"]
    assert remtta_here("adapt", "frames", *options, "-o", "first") == 0
    assert remtta_here("apply", "first", "-o", "whole.safetensors") == 0
    sizes = "depth=2 embed_dim=48 img_size=32 num_heads=3 patch_size=4"
    use = f"predict with it: remtta adapt FRAMES --model vit_tiny_patch16_224 --model-kwargs {sizes} --num-classes 7"
    changed = f"{use} --mean 0.1 0.2 0.3 --std 0.5 0.5 0.5 --interpolation bicubic --crop-pct 1"
    assert capfd.readouterr().err.splitlines()[-1] == f"{changed} --checkpoint whole.safetensors --method source"
    whole = [*changed.split()[6:], "--checkpoint", "whole.safetensors", "--method", "source"]
    assert remtta_here("adapt", "frames", *whole, "-o", "whole") == 0
    options = ["--mean", "0.5", "--std", "0.5", "--crop-pct", "0.9", "-o", "usual", "--overwrite"]
    assert remtta_here("adapt", "frames", *TINY_OPTIONS, "--checkpoint", "tiny.safetensors", *options) == 0
    assert remtta_here("apply", "usual", "-o", "usual.safetensors") == 0
    assert capfd.readouterr().err.splitlines()[-1] == f"{use} --checkpoint usual.safetensors --method source"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert remtta_here("adapt", "../frames", "--delta", "../first", "-o", "second") == 0
    preprocessing = record_of(tmp_path / "elsewhere" / "second")["preprocessing"]
    assert preprocessing["mean"] == [0.1, 0.2, 0.3]
