"""Settings tried on a stretch of a stream."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from remtta.cli.tune import _command, _table, _verdict
from remtta.errors import UsageError
from remtta.runs.tuning import Trial, choose, grid_of, label_lead, lead, read_true_labels
from tests.command import refusal_of, remtta_here
from tests.conftest import draw_folder


def trial(information: list[float], right: list[bool] | None = None, **values: object) -> Trial:
    told = torch.tensor(information, dtype=torch.float64)
    return Trial(values, told, 1.0, 5, torch.tensor(right or [], dtype=torch.bool), 1.0)


DEFAULT = trial([1.0, 1.2, 0.9, 1.1])
SOURCE = trial([0.9, 1.1, 0.8, 1.0], method="source")
HALF = [True, False] * 25


def test_the_default_is_kept_unless_something_else_is_better_by_more_than_chance() -> None:
    lucky, better = trial([2.0, 0.9, 1.2, 1.2], lr=0.03), trial([1.1, 1.4, 1.0, 1.2], lr=0.1)
    assert choose([SOURCE, DEFAULT, lucky]).by == "default"  # +0.275 ± 0.25
    chosen = choose([SOURCE, DEFAULT, lucky, better])  # +0.125 ± 0.025
    assert (chosen.trial, chosen.by) == (better, "evidence")
    assert lead(better, DEFAULT).standard_error == pytest.approx(0.025)
    assert lead(trial([9.0, 9.0]), trial([1.0, 1.0])).standard_error == math.inf  # too short a stretch


def test_labels_count_before_evidence() -> None:
    default = trial([1.0, 1.2, 0.9, 1.1], HALF)
    sharper, right = trial([2.0, 2.2, 1.9, 2.2], [False] * 50, lr=1), trial([1.0, 1.1, 1.0, 1.0], [True] * 50, lr=2)
    chosen = choose([trial([0.0] * 4, HALF), default, sharper, right])
    assert (chosen.trial, chosen.by) == (right, "labels")
    assert choose([trial([0.0] * 4, HALF), default, sharper]).by == "default"  # told apart more, and wrong
    assert label_lead(right, default).mean == 0.5


def test_a_grid_is_the_default_and_all_combinations() -> None:
    assert grid_of({"lr": [0.1, 0.2], "batch_size": [5]}) == [
        {},
        {"lr": 0.1, "batch_size": 5},
        {"lr": 0.2, "batch_size": 5},
    ]
    for values in ({"lr": [-1]}, {"nothing": [1]}, {"method": ["tenth"]}):
        with pytest.raises(UsageError):
            grid_of(values)


def test_labels_are_read_as_pick_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "picked.csv"
    path.write_text("index,source,frame,label_true\n0,a.png,,cat\n1,b.mp4,7,1\n2,c.png,,\n")
    assert read_true_labels(path, ["dog", "cat"]) == {("a.png", None): 1, ("b.mp4", 7): 1}
    path.write_text("source,label_true\na.png,\n")
    with pytest.raises(UsageError, match="no label in its column label_true"):
        read_true_labels(path, ["dog", "cat"])
    for text, reason in (("source\nx\n", "needs the columns"), ("source,label_true\nx,cow\n", '"cow" is no class')):
        path.write_text(text)
        with pytest.raises(UsageError, match=reason):
            read_true_labels(path, ["dog", "cat"])


def test_a_stretch_is_tried_and_a_command_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = draw_folder(tmp_path / "frames", range(12))
    labels = tmp_path / "labels.csv"
    labels.write_text(f"source,label_true\n{frames / '3.png'},stop\n{frames / '4.png'},2\n")
    args: list[str | Path] = [
        frames,
        "--model",
        "remtta-demo",
        "--grid",
        "lr=0.02",
        "--batch-size",
        "6",
        "--limit",
        "10",
    ]
    assert remtta_here("tune", *args, "--true-labels", labels, "--json", "-q") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["by"] == "default"
    assert told["command"] == f"remtta adapt {frames} --model remtta-demo --batch-size 6"
    assert [each["settings"] for each in told["trials"]] == [
        {"method": "source"},
        {"batch_size": 6},
        {"batch_size": 6, "lr": 0.02},
    ]
    assert told["trials"][2]["lead"]["standard_error"] is None
    assert all(each["labelled"] == 2 for each in told["trials"])


def test_the_verdict_tells_where_frames_are_too_few_to_choose_by() -> None:
    few, many = ([trial([1.0] * count, HALF, lr=rate) for rate in (0.1, 0.01)] for count in (2, 4))
    assert _verdict(few, choose(few)).startswith("Too few frames to choose by without labels")
    assert _verdict(many, choose(many)).startswith("Nothing tried is better than the default")


def test_the_table_has_a_line_for_each_and_the_command_its_options() -> None:
    better = trial([1.1, 1.4, 1.0, 1.2], HALF, lr=0.1, mask_ratios=(0, 0.1))
    trials = [trial([0.9] * 4, HALF, method="source"), trial([1.0, 1.2, 0.9, 1.1], HALF), better]
    lines = _table(trials)
    assert [line.split()[0] for line in lines[1:]] == ["method=source", "default", "lr=0.1"]
    assert "+0.125 ± 0.025" in lines[3]
    assert "25/50 (+0.0 ± 0.0 points)" in lines[3]
    given = {"name": "vit", "model_kwargs": {"depth": 6}, "mean": (0.5, 0.5, 0.5), "use_ema": True, "std": None}
    assert _command("a b", given, None, choose(trials)) == (
        "remtta adapt 'a b' --model vit --model-kwargs depth=6 --mean 0.5 0.5 0.5 --use-ema --lr 0.1 "
        "--set 'mask_ratios=(0, 0.1)'"
    )


def test_what_cannot_be_tried_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert refusal_of(capfd, "tune", "-", "--model", "remtta-demo")[0] == 2
    assert "--grid takes KEY=A,B" in refusal_of(capfd, "tune", tmp_path, "--grid", "lr")[1]
