"""Accuracy is estimated without labels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.table import method_config
from remtta.options import RunOptions
from remtta.pipeline.accuracy import WINDOW, Calibration, Estimator
from remtta.pipeline.events import describe
from remtta.runs.reading import shown_estimates
from tests.conftest import draw_folder
from tests.pipeline.helpers import transformed
from tests.records import json_of, record_of, rows_of
from tests.runs.tiny import adapt_tiny, stop_after

CLASSES = 10


def seen(count: int, *, signal: float = 4.0, seed: int = 0, labels: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
    """Logits (B, 10) of images, and their classes; a classifier of a Gaussian world, and so a calibrated one."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(CLASSES, size=count) if labels is None else labels
    seen_as = signal * np.eye(CLASSES)[classes] + 1.5 * rng.standard_normal((count, CLASSES))
    return torch.from_numpy(signal * seen_as / 1.5**2).float(), torch.from_numpy(classes)


def accuracy(logits: Tensor, classes: Tensor) -> float:
    return float((logits.argmax(1) == classes).double().mean())


def calibrated() -> Calibration:
    logits, classes = seen(1000, seed=1)
    return Calibration.fit(accuracy(logits, classes), 3 * logits)  # of a model that is too sure by a factor of 3


def new_estimator(expire_below: float | None = None) -> Estimator:
    return Estimator(calibrated(), CLASSES, expire_below)


def test_a_calibration_finds_the_scale_of_the_logits() -> None:
    assert calibrated().scale == pytest.approx(1 / 3, rel=0.2)
    assert calibrated().scale_likeliest == pytest.approx(calibrated().scale)  # of ten classes the ten likeliest are all
    assert 2.1 < calibrated().diversity < 2.4 and calibrated().images == 1000


@pytest.mark.parametrize("signal", [4.0, 3.0, 2.5])
def test_an_estimate_falls_with_the_accuracy(signal: float) -> None:
    logits, classes = seen(500, signal=signal)
    estimator = new_estimator()
    transformed(estimator, 3 * logits)
    assert estimator.estimates["answers"] <= accuracy(logits, classes) + 0.05
    assert estimator.estimates["adapted"] == estimator.estimates["answers"]


def test_fewer_classes_by_chance_alone_cost_nothing() -> None:
    many = 1000
    classes = torch.from_numpy(np.random.default_rng(3).integers(many, size=700))
    logits = 20.0 * torch.nn.functional.one_hot(classes, many)  # sure, and known to be right in eight of ten
    for calibrating in (200, 1):
        estimator = Estimator(Calibration.fit(0.8, logits[:calibrating]), many)
        transformed(estimator, logits[200:])
        assert 0.79 <= estimator.estimates["answers"] <= 0.8
    transformed(estimator, logits[200].expand(WINDOW, -1))
    assert estimator.estimates["answers"] == 0.8  # a single image estimator nothing of how diverse classes are


def test_a_model_that_collapses_to_a_class_with_certainty_is_reported() -> None:
    logits = 3 * seen(500)[0]
    collapsed = logits.clone()
    collapsed[:, 0] += 50
    estimator = new_estimator()
    transformed(estimator, logits, weight=0.5, raw_adapted=collapsed, raw_source=logits)
    assert estimator.estimates["adapted"] < 0.4 < 0.8 < estimator.estimates["source"] == estimator.estimates["answers"]
    transformed(estimator, logits, weight=0.0, raw_adapted=collapsed, raw_source=logits)
    assert estimator.estimates["answers"] == estimator.estimates["source"]


def test_labels_that_persist_are_no_collapse() -> None:
    logits, classes = seen(500, labels=np.repeat([1, 5, 1, 5, 1, 5, 1, 5, 1, 5], 50))
    estimator = new_estimator()
    transformed(estimator, 3 * logits)
    assert estimator.estimates["answers"] == pytest.approx(accuracy(logits, classes), abs=0.05)


@pytest.mark.parametrize(
    ("count", "source", "order", "images", "told"),
    [
        (200, 2.0, "shuffled", True, "; adapted +"),
        (200, 4.0, "shuffled", True, "; cannot tell whether adaptation helps ("),  # both models are as good
        (199, 2.0, "shuffled", True, "; cannot tell whether adaptation helps"),  # few frames
        (200, 2.0, "by class", True, "; cannot tell whether adaptation helps"),
        (200, 2.0, "shuffled", False, "; cannot tell whether adaptation helps"),  # not calibrated
    ],
)
def test_a_gain_is_reported_only_where_the_evidence_holds(
    count: int, source: float, order: str, images: bool, told: str
) -> None:
    labels = np.random.default_rng(5).integers(CLASSES, size=count)
    labels = np.sort(labels) if order == "by class" else labels
    adapted, classes = seen(count, labels=labels)
    logits = seen(count, signal=source, labels=labels, seed=1)[0]
    estimator = Estimator(calibrated() if images else Calibration.assumed(0.9, CLASSES), CLASSES)
    transformed(estimator, 3 * adapted, raw_adapted=3 * adapted, raw_source=3 * logits, weight=0.5)
    found = estimator.estimates
    text = shown_estimates(found).partition(" %")[2]
    assert text.startswith(told) if told[-1] in "+(" else text == told
    if "gain" in found:
        true = accuracy(adapted, classes) - accuracy(logits, classes)
        assert 0.06 < found["gain_error"] < 0.6 and abs(found["gain"] - true) < found["gain_error"]


@pytest.mark.parametrize(
    ("count", "order", "told"),
    [(500, "shuffled", True), (199, "shuffled", False), (500, "by class", False), (500, "one", False)],
)
def test_of_centering_alone_the_gain_follows_from_what_it_changed(count: int, order: str, told: bool) -> None:
    labels = np.random.default_rng(5).integers(CLASSES, size=count)
    labels = np.sort(labels) if order == "by class" else 0 * labels if order == "one" else labels
    centered, classes = seen(count, labels=labels, signal=2.0)
    raw = centered + torch.tensor([1.5] + [0.0] * (CLASSES - 1))
    estimator = Estimator(calibrated(), CLASSES, only_centers=True)
    for rows in torch.arange(count).split(50):
        transformed(estimator, 3 * centered[rows], adapted=3 * centered[rows], raw_adapted=3 * raw[rows])
    found = estimator.estimates
    assert ("gain" in found) is told
    assert found["answers"] == found["adapted"] == pytest.approx(found["source"] + found.get("gain", 0), abs=2e-4)
    if told:
        true = accuracy(centered, classes) - accuracy(raw, classes)
        assert true > 0.01 and abs(found["gain"] - true) < found["gain_error"]


def test_a_gain_that_rounds_to_zero_is_not_negative() -> None:
    found = {"answers": 0.5, "adapted": 0.5, "gain": -0.003, "gain_error": 0.02}
    assert shown_estimates(found) == "50 %; cannot tell whether adaptation helps (+0 ± 2 points over the source model)"


def test_there_is_no_estimate_of_a_few_frames() -> None:
    estimator = new_estimator()
    transformed(estimator, seen(99)[0])
    assert estimator.estimates == {} and estimator.events() == []


def test_clean_streams_raise_no_alarm_and_bad_ones_one() -> None:
    """Eight clean streams, at a limit of 5 points below their accuracy."""
    photographs, classes = seen(1000, seed=2)
    limit = accuracy(photographs, classes) - 0.05
    for seed in range(8):
        estimator = new_estimator(limit)
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))
        for batch in (3 * photographs[order]).split(500):
            transformed(estimator, batch)
        assert estimator.events() == []
    for _ in range(3):
        transformed(estimator, 3 * seen(500, signal=2.0)[0])
    (event,) = estimator.events()
    assert event["event"] == "expired" and event["estimate"] < event["expire_below"] == limit
    assert "consider training the model again" in describe(event)
    transformed(estimator, 3 * photographs[:500])
    transformed(estimator, 3 * seen(500, signal=2.0)[0])
    assert len(estimator.events()) == 1  # anew, once it was better


def test_a_run_tells_its_accuracy_and_continues_as_calibrated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frames, clean = tmp_path / "frames", tmp_path / "clean"
    for folder, count in ((frames, 120), (clean, 40)):
        draw_folder(folder, range(count), "{:03}.png")
    options = {"batch_size": 40, "estimate": 0.9, "expire_below": 0.5}
    whole, parts, health = tmp_path / "whole", tmp_path / "parts", tmp_path / "health.json"
    summary = adapt_tiny(frames, whole, "tent", options=options, source_data=clean, health=health)
    rows, record = rows_of(whole), record_of(whole)
    assert ["estimate" in row for row in rows] == [False] * 80 + [True] * 40
    assert rows[-1]["estimate"] == record["accuracy"]["last"] == json_of(health)["estimate"] == summary.estimates
    assert set(rows[-1]["estimate"]) == {"answers", "adapted", "source"}
    assert record["accuracy"]["calibration"]["images"] == 40 and (whole / "events.jsonl").exists()
    assert "%; cannot tell whether adaptation helps\n" in summary.report()
    assert "--expire-below needs 500 frames; with 120, accuracy was not checked" in caplog.text
    every_second = method_config("remtta", {"adapt_every": 2}, batch_size=40)
    adapt_tiny(
        2 * sorted(frames.iterdir()),
        tmp_path / "every",
        "remtta",
        config=every_second,
        options=options,
        source_data=clean,
    )
    assert set(rows_of(tmp_path / "every")[-1]["estimate"]) == {"answers", "adapted", "source"}
    stop_after(2, frames, parts, "tent", options=options, source_data=clean)
    adapt_tiny(frames, parts, "tent", options=options, resume=True)  # without the images
    assert (parts / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()


def test_limits_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for estimate, expire_below in ((1.0, None), (0.5, 0.6), (None, 0.6)):
        with pytest.raises(UsageError, match=r"accuracy above 0|below the estimate|add --estimate"):
            RunOptions(estimate=estimate, expire_below=expire_below)
    statistics = tmp_path / "statistics.safetensors"
    statistics.touch()
    with pytest.raises(UsageError, match="is not a folder of images"):
        adapt_tiny([], tmp_path / "run", "tent", options={"estimate": 0.5}, source_data=statistics)
