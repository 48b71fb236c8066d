"""The rows on batches, in `batches.jsonl`."""

from pathlib import Path

import pytest
import torch

from remtta.methods.table import method_config
from remtta.options import GuardOptions
from remtta.runs.folder import BATCHES
from tests.conftest import draw_folder
from tests.records import lines_of, rows_of
from tests.runs.tiny import adapt_tiny, camera, made_run, stop_after


def predicted_by_source(run: Path) -> dict[int, int]:
    """The class that the source model predicted for each frame, as the run recorded it."""
    classes = {row["index"]: row["class"] for row in rows_of(run)}
    for batch in lines_of(run / BATCHES):
        classes |= {row["index"]: row["class"] for row in batch["source"]}
    return classes


@pytest.mark.parametrize("earlier", ["stopped", "killed0", "killed1", "killed2"])
def test_a_resumed_run_has_the_same_rows(frames: Path, tmp_path: Path, earlier: str) -> None:
    run = made_run(frames, tmp_path / "run", earlier)
    if earlier != "stopped":
        with open(run / BATCHES, "a") as file:
            file.write('{"frame": 11, "fra')  # a line that was cut off
    adapt_tiny(frames, run, resume=True)
    rows = lines_of(run / BATCHES)
    assert [(row["frame"], row["frames"]) for row in rows] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert rows == lines_of(frames.parent / "whole" / BATCHES)


def test_a_camera_keeps_its_rows_and_goes_on_behind_them(tmp_path: Path) -> None:
    stop_after(2, camera(9), tmp_path / "run")
    adapt_tiny(camera(3), tmp_path / "run", resume=True)
    assert [row["frame"] for row in lines_of(tmp_path / "run" / BATCHES)] == [0, 3, 6]


@pytest.mark.parametrize("method", ["remtta", "fast", "source"])
def test_the_source_model_s_classes_are_those_of_a_run_of_it(tmp_path: Path, method: str) -> None:
    frames = draw_folder(tmp_path / "frames", range(12))
    options = {"guard": GuardOptions("warn", "adapted")}
    config = method_config(method, {}, batch_size=3)
    adapt_tiny(frames, tmp_path / "run", method, config=config, options=options)
    adapt_tiny(frames, tmp_path / "source", "source")
    expected = {row["index"]: row["class"] for row in rows_of(tmp_path / "source")}
    assert predicted_by_source(tmp_path / "run") == expected
    changed = {row["index"]: row["class"] for row in rows_of(tmp_path / "run")} != expected
    assert changed == (method != "source")


def test_a_source_model_that_saw_other_images_or_none_is_not_recorded(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(6))
    adapt_tiny(frames, tmp_path / "shifted", "remtta", options={"guard": GuardOptions("rollback", "both")})
    adapt_tiny(frames, tmp_path / "alone", "tent", options={"guard": GuardOptions("off", "adapted")})
    for run in ("shifted", "alone"):
        assert all("source" not in row for row in lines_of(tmp_path / run / BATCHES))
    disagreements = [row.get("disagreement") for row in lines_of(tmp_path / "shifted" / BATCHES)]
    each = [sum("each" in row for row in rows_of(tmp_path / "shifted")[start : start + 3]) / 3 for start in (0, 3)]
    assert disagreements == pytest.approx(each, abs=1e-4)


def test_the_shift_is_the_norm_of_the_offset_and_distances_of_sketches_those_of_mean_logits(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", range(12))
    config = method_config("center", {}, batch_size=3)
    adapt_tiny(frames, tmp_path / "run", "center", config=config, options={"guard": None, "logits": True})
    adapt_tiny(frames, tmp_path / "source", "source", options={"guard": None, "logits": True})
    answers = (rows_of(tmp_path / run) for run in ("source", "run"))
    raw, centered = (
        torch.tensor([[z * row.get("temperature", 1) for z in row["logits"]] for row in rows]) for rows in answers
    )
    offsets, means = (raw - centered)[::3], raw.reshape(4, 3, -1).mean(1)
    rows = lines_of(tmp_path / "run" / BATCHES)
    norms = [float(offset.norm()) for offset in offsets - offsets.mean(1, keepdim=True)]
    assert [row["shift"] for row in rows] == pytest.approx(norms, rel=1e-3)
    # A projection to 16 numbers keeps a squared distance with a relative standard deviation of sqrt(2 / 16).
    sketches = torch.tensor([row["sketch"] for row in rows])
    distances = [torch.pdist(each).norm() for each in (sketches, means - means.mean(1, keepdim=True))]
    assert 0.6 < float(distances[0] / distances[1]) < 1.4
