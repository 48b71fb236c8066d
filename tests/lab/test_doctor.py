"""Which preprocessing fits a model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from remtta.lab.demo.demo_model import CLASS_NAMES
from remtta.lab.demo.signs import render_sign
from remtta.lab.doctor import Candidate, Finding, are_conclusive, candidates_of
from remtta.models.preprocessing import Preprocessing
from remtta.streams.sources import open_stream
from tests.command import refusal_of, remtta_here, terminal_of

HALF = Preprocessing((48, 48), (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0, "center")
EYE = 9 * torch.eye(6)


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of road signs, in folders by their names."""
    root = tmp_path_factory.mktemp("signs")
    rng = np.random.default_rng(0)
    for number in (0, 6, 7, 9):
        (root / CLASS_NAMES[number]).mkdir()
        for copy in range(5):
            Image.fromarray(render_sign(number, rng)).save(root / CLASS_NAMES[number] / f"{copy}.png")
    return root


def finding(logits: torch.Tensor, **changes: object) -> Finding:
    return Finding(Candidate("", Preprocessing(**{**vars(HALF), **changes})), logits)


def test_the_right_preprocessing_fits(signs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("doctor", signs, "--model", "remtta-demo", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]
    assert report["images"] == 20
    masks = {"masks": ["attention", "features"]}
    assert report["rem"] == {**masks, "adapts": "blocks 0-7 of 8", "weights": 4352, "refused": None}


def test_a_wrong_preprocessing_is_found_and_gives_exit_code_3(signs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "remtta-demo", "--limit", "16", "--mean", "0", "--std", "1"]
    assert remtta_here("doctor", signs, *args) == 3
    page = capsys.readouterr().out
    assert "images   16 of" in page
    assert "try      --mean 0." in page
    assert "confirm  with clean images of many classes, or else frames of many conditions" in page
    assert "REM masks by: attention (default), features, random" in page


def test_on_a_terminal_a_bar_tells_how_many_predictions_are_made(signs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_of(monkeypatch)
    assert remtta_here("doctor", signs, "--model", "remtta-demo") == 0
    assert "160/160" in terminal.getvalue()  # 20 images, 8 preprocessings


def test_for_swapped_channels_no_options_are_recommended(
    signs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, path in enumerate(signs.rglob("*.png")):
        Image.fromarray(np.asarray(Image.open(path))[..., ::-1].copy()).save(tmp_path / f"{number}.png")
    assert remtta_here("doctor", tmp_path, "--model", "remtta-demo") == 3
    page = capsys.readouterr().out
    assert "Red and blue are swapped" in page and "try  " not in page and "confirm  " in page


def test_images_that_tell_the_model_little_get_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    for number in range(16):
        Image.fromarray(rng.integers(0, 256, (48, 48, 3), np.uint8)).save(tmp_path / f"{number}.png")
    args = ["--model", "remtta-demo", "--mean", "0", "--std", "1"]
    assert remtta_here("doctor", tmp_path, *args) == 0
    page = capsys.readouterr().out
    assert (
        "No verdict: the model is too uncertain, or predicts nearly the same for all images. Try clean images" in page
    )
    assert remtta_here("doctor", tmp_path, *args, "--json") == 0
    assert json.loads(capsys.readouterr().out)["fits"] is None
    blurred, sharp = finding(EYE.repeat(8, 1) / 9), finding(EYE.repeat(8, 1))
    assert are_conclusive([blurred, sharp]) and not are_conclusive([blurred, blurred])


def test_too_few_images_are_refused_without_a_password(
    signs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    camera = replace(open_stream(str(signs / "stop")), name="rtsp://***@cam")
    monkeypatch.setattr("remtta.streams.sources.open_stream", lambda source: camera)
    line = refusal_of(capfd, "doctor", "rtsp://me:secret@cam", "--model", "remtta-demo", code=1)
    assert line == "Error: rtsp://***@cam: 5 readable images, but at least 16 are needed"
    line = refusal_of(capfd, "doctor", signs, "--model", "remtta-demo", "--limit", "8")
    assert line == "Error: --limit must be at least 16, got 8"


def test_candidates_have_each_preprocessing_once() -> None:
    candidates = candidates_of(HALF)
    assert candidates[0] == Candidate("mean, std: 0.5", HALF)
    assert len({(each.preprocessing, each.swapped) for each in candidates}) == len(candidates) == 8
    configured = Preprocessing((48, 48), (0.4,) * 3, (0.5,) * 3, "bilinear", 0.875, "center")
    assert candidates_of(configured)[0] == Candidate("mean, std: as configured", configured)
    assert len(candidates_of(configured)) == 10
