from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import cv2
import numpy as np
import pytest

import remtta
from tests.conftest import NUM_CLASSES, TINY, draw_image

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> ModuleType:
    """An example script whose models are the tiny random one."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def load_tiny(_: object, **__: Any) -> Any:
        return remtta.load_model(
            "vit_tiny_patch16_224", checkpoint=checkpoint, num_classes=NUM_CLASSES, model_kwargs=TINY
        )

    name = "load_base" if hasattr(module, "load_base") else "load_model"
    monkeypatch.setattr(module, name, load_tiny)
    return module


def test_own_loop(
    frames: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example("own_loop", monkeypatch, checkpoint).main([str(frames), "--batch-size", "5"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.count(",") + 1 for line in lines[:3]] == [5, 5, 2]
    assert lines[3].startswith("3 updates, ")


def test_own_loop_leaves_out_what_cannot_be_read(
    frames: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (frames / "frame_3.png").write_text("no image")
    example("own_loop", monkeypatch, checkpoint).main([str(frames), "--batch-size", "6"])
    captured = capsys.readouterr()
    assert [line.count(",") + 1 for line in captured.out.splitlines()[:2]] == [5, 6]
    assert "left out" in captured.err


def test_adapt_video_and_restore_delta(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    video = str(tmp_path / "clip.avi")
    writer = cv2.VideoWriter(video, cv2.VideoWriter.fourcc(*"MJPG"), 10, (40, 36))
    for number in range(20):
        writer.write(np.asarray(draw_image(number // 5))[..., ::-1])
    writer.release()
    run = tmp_path / "run"
    example("adapt_video", monkeypatch, checkpoint).main([video, "--every", "2", "--output", str(run)])
    assert capsys.readouterr().out.endswith("10 frames, 1 updates\n")
    example("restore_delta", monkeypatch, checkpoint).main([str(run / "delta.safetensors")])
    assert capsys.readouterr().out.endswith("12 adapted tensors, from 4 frames of rem\n")  # without the repeated ones


def test_examples_use_only_public_names() -> None:
    for name in ("own_loop", "adapt_video", "restore_delta"):
        text = (EXAMPLES / f"{name}.py").read_text()
        assert "from remtta import" in text
        assert "from remtta." not in text
