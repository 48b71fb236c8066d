"""Bad input gets one clear line and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.command import refusal_of
from tests.conftest import NUM_CLASSES, TINY_OPTIONS, draw_folder, tiny_vit


def _errors() -> list[Any]:
    tiny = [*TINY_OPTIONS, "--checkpoint", "tiny.safetensors"]
    other = [part if part != str(NUM_CLASSES) else "9" for part in tiny]
    return [
        (["adapt", "nowhere"], 2, "nowhere: no such file or folder"),
        (["adapt", "empty"], 2, "empty: no images or videos in this folder or below it"),
        (["adapt", "text.mp4", *tiny], 1, "text.mp4 cannot be opened as a video"),
        (["adapt", "text.jpg", *tiny, "-o", "text"], 1, "none of 1 frame could be read"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_225"], 2, "did you mean vit_tiny_patch16_224"),
        (["eval", "empty", *tiny], 2, "empty: no images in this folder or below it"),
        (["adapt", "frames", *tiny, "--predictions", "-", "--replay"], 2, "add --predictions - and --resume"),
        (["adapt", "frames", *tiny, "--adapt-layers", "0-9"], 2, "no block 9: the model has blocks 0-1"),
        (["adapt", "frames", "--model", "vit_tiny_patch16_224.x"], 2, "choose vit_tiny_patch16_224.augreg"),
        (["adapt", "frames", *tiny, "--predictions", "out.jsonl"], 2, "--predictions takes -"),
        (["adapt", "frames", *tiny, "--device", "cuda:99"], 2, "is not available"),
        (["adapt", "frames", *tiny, "--output", "text.jpg"], 2, "text.jpg is a file"),
        (["adapt", "frames", *tiny, "--delta", "tiny.safetensors"], 4, "not a remtta delta"),
        (["adapt", "frames", *other], 4, "the file has 7 classes: see --num-classes"),
        (["adapt", "frames", *tiny[:-1], "nowhere.pth"], 2, "no such checkpoint file"),
        (["apply", "text.jpg", "-o", "out.safetensors"], 4, "not a readable safetensors file"),
        (["apply", "tiny.safetensors", "-o", "out.pth"], 2, "must end in .safetensors"),
        (["inspect", "empty"], 2, "empty holds no run"),
        (["inspect", "."], 2, "there are runs in below"),
        (["adapt", "frames", "--model", "remtta-demo", "--num-classes", "9"], 2, "remtta-demo is one fixed model"),
        (["apply", "empty", "-o", "out.safetensors"], 2, "empty/delta.safetensors: no such delta file"),
        (
            ["adapt", "http://127.0.0.1:9/x", *tiny],
            1,
            "http://127.0.0.1:9/x cannot be opened as a video (the connection",
        ),
        (["adapt", "htp://me:key@host/x"], 2, 'htp://***@host/x: unknown protocol "htp"; use rtsp://, http://'),
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of what is good and what is not."""
    root = tmp_path_factory.mktemp("place")
    draw_folder(root / "frames", range(2))
    save_file(tiny_vit().state_dict(), root / "tiny.safetensors")
    for name in ("empty", "below"):
        (root / name).mkdir()
    (root / "below" / "run.json").write_text("{}")
    (root / "text.mp4").write_text("no video")
    (root / "text.jpg").write_text("no image")
    return root


@pytest.mark.parametrize(
    ("args", "code", "text"),
    _errors(),
    ids=lambda value: "-".join(value[:2] + value[-1:]) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    args: Sequence[str],
    code: int,
    text: str,
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    before = set(place.rglob("*"))
    exit_code, told = refusal_of(capfd, *args)
    assert exit_code == code
    assert text in told
    made = {path.relative_to(place).parts[0] for path in set(place.rglob("*")) - before}
    assert made <= {"text"}
