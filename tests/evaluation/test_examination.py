"""Which preprocessing fits a model, by what it says of images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from remtta import load_model
from remtta.demo.signs import render_sign
from remtta.evaluation.examination import Candidate, Finding, better_than, candidates_of, class_order, examine
from remtta.models.embedded import CLASS_NAMES
from remtta.models.preprocessing import Preprocessing
from tests.command import refusal_of, remtta_here

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
    told = json.loads(capsys.readouterr().out)
    assert told["fits"]
    assert told["images"] == 20
    assert told["labels"] == "class name"
    assert told["candidates"][0]["accuracy"] == 1
    assert told["class_order"]["mistaken"] == {}
    assert told["rem"] == {
        "masks": ["attention", "features"],
        "adapts": "blocks 0-5 of 8",
        "weights": 3072,
        "refused": None,
    }


def test_a_wrong_preprocessing_is_found_and_gives_exit_code_3(signs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "remtta-demo", "--limit", "16", "--mean", "0", "--std", "1"]
    assert remtta_here("doctor", signs, *args) == 3
    page = capsys.readouterr().out
    assert "images   16 of" in page
    assert "labels   by class name" in page
    assert "try      --mean 0." in page
    assert "REM masks by: attention (default), features, random" in page


def test_classes_in_another_order_are_found(signs: Path) -> None:
    order = [*CLASS_NAMES[1:], CLASS_NAMES[0]]
    report = examine(load_model("remtta-demo", labels=order), str(signs), limit=20)
    assert not report["fits"] and report["better"] is None
    assert report["class_order"]["accuracy"] == 0 and report["class_order"]["mistaken"]["stop"] == 7


def test_too_few_images_are_refused(signs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    told = refusal_of(capfd, "doctor", signs / "stop", "--model", "remtta-demo")
    assert told == (1, f"Error: {signs / 'stop'}: 5 readable images, and the doctor needs 16")


def test_candidates_have_each_preprocessing_once() -> None:
    candidates = candidates_of(HALF)
    assert candidates[0] == Candidate("mean, std: 0.5", HALF)
    assert len({(each.preprocessing, each.swapped) for each in candidates}) == len(candidates) == 10
    own = Preprocessing((48, 48), (0.4,) * 3, (0.5,) * 3, "bilinear", 0.875, "center")
    assert candidates_of(own)[0] == Candidate("mean, std: as configured", own)
    assert len(candidates_of(own)) == 12


def test_without_labels_higher_mutual_information_is_better_except_for_crops() -> None:
    blurred, sharp = EYE.repeat(8, 1) / 9, EYE.repeat(8, 1)
    better = better_than([finding(blurred), finding(sharp, mean=(0.4,) * 3)], None)
    assert better is not None
    assert better.by == "information"
    assert better.lead > 2 * better.standard_error > 0
    assert better_than([finding(sharp), finding(blurred, mean=(0.4,) * 3)], None) is None
    assert better_than([finding(blurred), finding(sharp, crop_pct=0.9)], None) is None


def test_labels_decide_where_there_are_enough() -> None:
    labels = torch.arange(6).repeat(8)
    wrong, right = EYE.roll(1, 1).repeat(8, 1), EYE.repeat(8, 1) / 9
    better = better_than([finding(wrong), finding(right, crop_pct=0.9)], labels)
    assert better is not None
    assert (better.by, better.lead) == ("accuracy", 1)
    assert better_than([finding(right), finding(wrong, mean=(0.4,) * 3)], labels) is None


def test_too_few_images_per_class_leave_the_order_unchecked() -> None:
    findings = [finding(EYE.repeat(3, 1))]
    labels = torch.arange(6).repeat(3)
    assert class_order(findings, labels, [str(number) for number in labels.tolist()], "number") is None


def test_one_class_for_everything_is_no_other_order() -> None:
    labels = torch.arange(6).repeat(8)
    folders = [str(number) for number in labels.tolist()]
    for predicted, fits in ((torch.full_like(labels, 3), True), ((labels + 1) % 6, False)):
        order = class_order([finding(EYE[predicted])], labels, folders, "number")
        assert order is not None and order["fits"] is fits
