"""Which frames of a run are picked for labelling."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch

from remtta.errors import RemttaError, UsageError
from remtta.models.embedded import CLASS_NAMES
from remtta.runs.picking import Predicted, doubt, farthest_first, read_predicted, write_list
from tests.command import remtta_here
from tests.conftest import draw_folder
from tests.records import json_of, rows_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve frames, with what both models said."""
    root = tmp_path_factory.mktemp("picking")
    frames = draw_folder(root / "frames", range(12))
    args = ["--model", "remtta-demo", "--batch-size", "6", "--each", "--lr", "0.1", "-q"]
    assert remtta_here("adapt", frames, *args, "--output", root / "run") == 0
    return root / "run"


def test_the_most_doubtful_frame_comes_first_and_no_frame_twice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("pick", run, "-n", "4", "--by", "doubt") == 0
    picked = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    rows = {str(row["index"]): row for row in rows_of(run)}
    assert len({row["index"] for row in picked}) == 4
    assert picked[0]["index"] == max(rows, key=lambda index: doubt(rows[index], 22))
    assert all(row["source"] == rows[row["index"]]["source"] and row["label_true"] == "" for row in picked)


def test_frames_are_listed_for_a_labelling_tool_or_copied(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert remtta_here("pick", run, "-n", "3", "--output", tmp_path / "list.json", "-q") == 0
    told = json_of(tmp_path / "list.json")
    assert [image["id"] for image in told["images"]] == [guess["image_id"] for guess in told["annotations"]]
    assert {category["name"] for category in told["categories"]} & set(CLASS_NAMES)
    assert len(told["categories"]) == 22
    assert remtta_here("pick", run, "-n", "3", "--output", tmp_path / "copies") == 0
    assert capsys.readouterr().err == f"{tmp_path / 'copies'}: 3 frames\n"
    copies = sorted(path.name for path in (tmp_path / "copies").glob("*.png"))
    assert copies == sorted(f"{image['id']:06d}_{Path(image['file_name']).name}" for image in told["images"])
    assert (tmp_path / "copies" / "picked.csv").is_file()
    assert remtta_here("pick", run, "--output", tmp_path / "list.json") == 2
    assert capsys.readouterr().err == f"Error: {tmp_path / 'list.json'} exists; choose another --output\n"


def test_a_name_that_is_no_utf_8_keeps_its_bytes(run: Path, tmp_path: Path) -> None:
    source = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9.png"))
    source.write_bytes(b"a picture")
    row = {"index": 3, "source": str(source), "class": 1, "label": None, "prob": 0.5, "entropy": 1.0}
    write_list(tmp_path / "copies", [row], read_predicted(run))
    assert b"\xe9.png" in (tmp_path / "copies" / "picked.csv").read_bytes()
    assert Path(tmp_path, "copies", f"000003_{source.name}").read_bytes() == b"a picture"
    (listed,) = csv.DictReader((tmp_path / "copies" / "picked.csv").read_text(errors="replace").splitlines())
    assert listed["disagree"] == ""  # which is not known without --each


def test_by_chance_every_frame_is_as_likely() -> None:
    predicted = Predicted([{"index": number} for number in range(10)], 3)
    draws = [predicted.by_chance(4, seed) for seed in range(50)]
    assert draws[0] == predicted.by_chance(4, 0)
    assert all(len({row["index"] for row in draw}) == 4 for draw in draws)
    assert {row["index"] for draw in draws for row in draw} == set(range(10))
    assert len(predicted.by_chance(99, 0)) == 10


def test_disagreement_counts_for_more_than_any_entropy() -> None:
    def row(entropy: float, *classes: int) -> dict[str, object]:
        return {"entropy": entropy, "each": {str(place): {"class": number} for place, number in enumerate(classes)}}

    assert doubt(row(0.1, 1, 2), 10) > doubt(row(2.3, 1, 1), 10) > doubt(row(0.1, 1, 1), 10)
    assert doubt({"entropy": 1.0}, 10) == pytest.approx(0.4343, abs=1e-4)  # 1 / ln 10


def test_each_pick_lies_farthest_from_those_before() -> None:
    features = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    assert farthest_first(features, 3) == [0, 3, 2]  # cosines to the first: 1, 0.999, 0, -1
    assert sorted(farthest_first(features, 9)) == [0, 1, 2, 3]


def test_what_cannot_be_picked_from_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        read_predicted(tmp_path)
    for kind, rows, reason in (("camera", "", "a live source"), ("folder", '{"index": 0, "error": "x"}\n', "holds no")):
        (tmp_path / "run.json").write_text(f'{{"model": {{"num_classes": 3}}, "source": {{"kind": "{kind}"}}}}')
        (tmp_path / "predictions.jsonl").write_text(rows)
        with pytest.raises(RemttaError, match=reason):
            read_predicted(tmp_path)
