"""Bad input gets one clear line and its exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.command import refusal_of, remtta_here
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, tiny_vit


def _errors() -> list[Any]:
    tiny = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors"]
    other = [part if part != str(NUM_CLASSES) else "9" for part in tiny]
    return [
        (["adapt", "nowhere"], 2, "nowhere: no such file or folder"),
        (["adapt", "empty"], 2, "empty: no images or videos in this folder or below it"),
        (["adapt", "*.gif"], 2, "*.gif: no file matches"),
        (["adapt", "text.mp4", *tiny], 1, "text.mp4 cannot be opened as a video"),
        (["adapt", "text.jpg", *tiny, "-o", "text"], 1, "none of 1 frame(s) could be read"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_225"], 2, "did you mean vit_tiny_patch16_224"),
        (["adapt", "frames", *tiny, "--model-kwargs", "num_heads=5"], 2, "could not be built: dim should be divisible"),
        (["eval", "empty", *tiny], 2, "empty: no images in this folder or below it"),
        (["corrupt", "empty", "c"], 2, "empty: no images in this folder or below it"),
        (["eval", "arrays", *tiny], 2, "fog.npy has 15 images, but labels.npy has 20 labels"),
        (["adapt", "frames", *tiny, "--predictions", "-", "--replay"], 2, "add --predictions - and --resume"),
        (["adapt", "frames", *tiny, "--resume", "-o", "text", "--replay"], 2, "add --predictions - and --resume"),
        (["adapt", "frames", "--model", "vit_base_patch16_siglip_255"], 2, "did you mean vit_base_patch16_siglip_2"),
        (["adapt", "frames", *tiny, "--mask-ratios", "0.1,0.2"], 2, "mask ratios must start with 0"),
        (["adapt", "frames", *tiny, "--mask-ratios", "x"], 2, "--mask-ratios takes numbers"),
        (["adapt", "frames", *tiny, "--lr", "0"], 2, "lr must be > 0"),
        (["adapt", "frames", *tiny, "--adapt-layers", "0-9"], 2, "no block 9: the model has blocks 0-3"),
        (["adapt", "frames", *tiny, "--mask-ratios", "0,0.999"], 2, "leaves none of 64 patch tokens"),
        (["adapt", "frames", "--model", "local-dir:nowhere"], 2, "no such folder with a config.json"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_224.x"], 2, "choose vit_tiny_patch16_224.augreg"),
        (["adapt", "frames", *tiny, "--predictions", "out.jsonl"], 2, "--predictions takes -"),
        (["adapt", "frames", *tiny, "--model-kwargs", "depth"], 2, "takes key=value pairs"),
        (["adapt", "frames", *tiny, "--labels", "nowhere.txt"], 2, "nowhere.txt"),
        (["adapt", "frames", *tiny, "--labels", "text.jpg"], 2, "names 1 classes, but the model has 7"),
        (["adapt", "frames", *tiny, "--device", "cuda:99"], 2, "is not available"),
        (["adapt", "frames", *tiny, "--output", "text.jpg"], 2, "text.jpg is a file"),
        (["adapt", "frames", *tiny, "--delta", "nowhere.safetensors"], 2, "no such delta file"),
        (["adapt", "frames", *tiny, "--delta", "tiny.safetensors"], 4, "not a remtta delta"),
        (["adapt", "frames", *tiny, "--delta", "text.jpg"], 4, "not a readable safetensors file"),
        (["adapt", "frames", *other], 4, "the file has 7 classes: see --num-classes"),
        (["adapt", "frames", *tiny, "--model-kwargs", "depth=5"], 4, "missing in the file: blocks.4"),
        (["adapt", "frames", *tiny[:-1], "text.jpg"], 4, "not a readable PyTorch checkpoint"),
        (["adapt", "frames", *tiny[:-1], "nowhere.pth"], 2, "no such checkpoint file"),
        (["apply", "text.jpg", "-o", "out.safetensors"], 4, "not a readable safetensors file"),
        (["apply", "tiny.safetensors", "-o", "out.pth"], 2, "must end in .safetensors"),
        (["inspect", "nowhere"], 2, "nowhere: no such file or folder"),
        (["inspect", "empty"], 2, "empty holds no run"),
        (["inspect", "."], 2, "there are runs in below"),
        (
            ["adapt", "frames", *tiny, "--seed", "-1"],
            2,
            "Invalid value for '--seed': Input should be greater than or equal to 0",
        ),
        (["adapt", "frames", "--model", "remtta-demo", "--num-classes", "9"], 2, "remtta-demo is one fixed model"),
        (["adapt", "frames", *tiny, "--mean", "124", "116", "104"], 2, "mean is for pixels in [0, 1]"),
        (["apply", "empty", "-o", "out.safetensors"], 2, "empty/delta.safetensors: no such delta file"),
        (
            ["adapt", "http://127.0.0.1:9/x", *tiny],
            1,
            "http://127.0.0.1:9/x cannot be opened as a video (the connection",
        ),
        (["adapt", "htp://me:key@host/x"], 2, 'htp://***@host/x: unknown protocol "htp"; use rtsp://, http://'),
    ]


@pytest.mark.parametrize(
    ("args", "code", "text"),
    _errors(),
    ids=lambda value: "-".join(value[:2] + value[-1:]) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    args: Sequence[str],
    code: int,
    text: str,
    frames: Path,
    checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "fog.npy", np.zeros((15, 32, 32, 3), np.uint8))
    np.save(tmp_path / "arrays" / "labels.npy", np.zeros(20, np.int64))
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "run.json").write_text("{}")
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "text.jpg").write_text("no image")
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    exit_code, told = refusal_of(capfd, *args)
    assert exit_code == code
    assert text in told
    made = {path.relative_to(tmp_path).parts[0] for path in set(tmp_path.rglob("*")) - before}
    assert made <= {"text"}


def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    frames: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import pickle

    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    (tmp_path / "trap.pth").write_bytes(pickle.dumps({"state_dict": Trap()}))
    torch.save({"state_dict": Trap()}, tmp_path / "trap2.pth")
    for name in ("trap.pth", "trap2.pth"):
        assert remtta_here("adapt", frames, *TINY_OPTIONS, "--checkpoint", tmp_path / name) == 4
        assert "could run code, so it was not loaded" in capfd.readouterr().err
    assert not marker.exists()


def test_apply_refuses_another_base_and_writes_nothing(
    frames: Path, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_file

    save_file(tiny_vit(seed=9).state_dict(), tmp_path / "other.safetensors")
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--output", tmp_path / "run"]
    assert remtta_here("adapt", frames, *options) == 0
    delta, out = tmp_path / "run" / "delta.safetensors", tmp_path / "out.safetensors"
    assert remtta_here("apply", delta, "--checkpoint", tmp_path / "other.safetensors", "--output", out) == 4
    assert "the delta was made on other weights" in capfd.readouterr().err
    assert not out.exists()
