"""Predictions are smoothed with earlier frames, where frames come in order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from remtta.models.preprocessing import preprocessing_of
from remtta.options import RunOptions
from remtta.pipeline.smoothing import Smoother
from remtta.runs.summary import RunSummary
from tests.conftest import draw_folder, draw_image, tiny_vit
from tests.lab.evaluation.trees import CLASSES as CLASS_NAMES
from tests.lab.evaluation.trees import open_tree
from tests.pipeline.helpers import transformed
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_tiny, stop_after

CLASSES, FRAMES = 10, 2000


def guesses(labels: np.ndarray, *, prefers: float = 0.0, noise: float = 1.5, seed: int = 0) -> Tensor:
    """Logits (B, 10) of a noisy classifier, which may prefer class 0."""
    rng = np.random.default_rng(seed)
    logits = noise * rng.standard_normal((len(labels), CLASSES)) + 2 * np.eye(CLASSES)[labels]
    logits[:, 0] += prefers
    return torch.from_numpy(logits).float()


def in_runs(seed: int = 0, longest: int = 50) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.concatenate([np.full(rng.integers(5, longest + 1), rng.integers(CLASSES)) for _ in range(FRAMES)])[
        :FRAMES
    ]


def error(logits: Tensor, labels: np.ndarray) -> float:
    return float((logits.argmax(1).numpy() != labels).mean())


@pytest.mark.parametrize(("prefers", "gain"), [(0.0, 0.2), (3.0, 0.04)])
def test_persisting_labels_are_predicted_better(prefers: float, gain: float) -> None:
    labels = in_runs()
    logits = guesses(labels, prefers=prefers)
    assert error(transformed(Smoother(CLASSES), logits), labels) < error(logits, labels) - gain


@pytest.mark.parametrize("prefers", [0.0, 3.0, 6.0])
def test_predictions_of_unordered_frames_stay_bit_for_bit(prefers: float) -> None:
    logits = guesses(np.random.default_rng(0).integers(CLASSES, size=FRAMES), prefers=prefers)
    assert torch.equal(transformed(Smoother(CLASSES), logits), logits)


def test_nearly_equal_frames_count_as_little_more_than_one() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=FRAMES // 25)
    logits = 1.4 * guesses(labels, noise=1.2).repeat_interleave(25, 0)  # calibrated; 25 frames of each image
    logits += 0.6 * torch.from_numpy(rng.standard_normal(logits.shape)).float()
    labels = labels.repeat(25)
    answers = transformed(Smoother(CLASSES), logits)
    assert error(answers, labels) < error(logits, labels)
    confidence, accuracy = answers.softmax(1).amax(1).mean(), 1 - error(answers, labels)
    assert confidence - accuracy < 0.15


def test_classes_in_turn_that_look_alike_are_not_taken_for_one_that_stays() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(400), rng.integers(1, 3, size=400))
    own, alike = np.eye(400)[labels], np.arange(400) // 4 == labels[:, None] // 4
    logits = torch.from_numpy(1.5 * rng.standard_normal((len(labels), 400)) + 4 * own + 3 * alike)
    answers = transformed(Smoother(400), logits)
    assert not torch.equal(answers, logits)  # there is an order
    assert error(answers, labels) < error(logits, labels) + 0.01


def test_it_ends_soon_after_the_order_does() -> None:
    rng = np.random.default_rng(1)
    labels = np.concatenate([in_runs(), rng.integers(CLASSES, size=FRAMES)])
    logits = guesses(labels)
    answers = transformed(Smoother(CLASSES), logits)
    assert not torch.equal(answers[:FRAMES], logits[:FRAMES])
    assert torch.equal(answers[FRAMES + 200 :], logits[FRAMES + 200 :])


def test_predictions_do_not_depend_on_batches_nor_on_early_ones() -> None:
    logits = guesses(in_runs()[:300])
    whole = transformed(Smoother(CLASSES), logits)
    smoother, answers = Smoother(CLASSES), []
    for start in range(0, 300, 30):
        part = logits[start : start + 30]
        early = [transformed(smoother, piece, early=True) for piece in part.split(7)]
        answers.append(transformed(smoother, part))
        assert torch.equal(torch.cat(early), answers[-1])
        after = Smoother(CLASSES)
        after.load_state_dict(smoother.state_dict())
        smoother = after
    assert torch.equal(torch.cat(answers), whole)


def test_certain_predictions_stay_finite() -> None:
    logits = torch.full((500, CLASSES), -1e4)
    logits[torch.arange(500), torch.from_numpy(in_runs()[:500])] = 1e4
    logits[200] = torch.nan  # one frame that is not predicted
    assert torch.isfinite(transformed(Smoother(CLASSES), logits)).all(1).tolist() == [
        progress != 200 for progress in range(500)
    ]


def decisive_vit() -> Any:
    """Return the tiny ViT with confident predictions of various classes for drawn images."""
    model: Any = tiny_vit()
    preprocessing = preprocessing_of(model)
    images = torch.stack([preprocessing.transform()(draw_image(seed)) for seed in range(20)])
    with torch.no_grad():
        model.head.bias -= model(preprocessing.normalise(images)).mean(0)
        model.head.weight *= 20
        model.head.bias *= 20
    return model


def test_a_run_records_the_frames_that_it_smooths_and_continues_bit_for_bit(tmp_path: Path) -> None:
    frames = draw_folder(tmp_path / "frames", [number // 5 for number in range(60)], "{:03}.png")
    options = {"smooth": "auto", "batch_size": 10}

    def run(name: str, source: Any = frames, **more: Any) -> RunSummary:
        return adapt_tiny(source, tmp_path / name, "tent", model=decisive_vit(), options={**options, **more})

    plain, summary = run("plain", smooth="off"), run("whole")
    rows, alone = rows_of(tmp_path / "whole"), rows_of(tmp_path / "plain")
    assert plain.progress.smoothed == 0 and 0 < summary.progress.smoothed < 60
    counted = record_of(tmp_path / "whole")["counts"]["smoothed"]
    assert sum("raw" in row for row in rows) == summary.progress.smoothed == counted
    assert [row.get("raw", row)["class"] for row in rows] == [row["class"] for row in alone]
    assert len({(tmp_path / name / "delta.safetensors").stat().st_size for name in ("whole", "plain")}) == 1
    assert f"smoothed over time: {summary.progress.smoothed} frames" in summary.report()
    counted = summary.progress.smoothed
    told = f"classes persist from frame to frame, in {counted} of 60 frames: --smooth auto combines their predictions"
    assert told in plain.report() and "classes persist" not in summary.report()
    assert record_of(tmp_path / "plain")["counts"]["in_order"] == plain.figures()["in_order"] == counted
    unordered = sorted(frames.iterdir(), key=lambda path: int(path.stem) * 7 % 60)
    report = run("unordered", unordered).report()
    assert "smoothed over time: none, as no relation between successive frames was found" in report
    plain = run("plain unordered", unordered, smooth="off")
    assert plain.in_order == 0 and "classes persist" not in plain.report()
    stop_after(5, frames, tmp_path / "parts", "tent", model=decisive_vit(), options=options)
    adapt_tiny(frames, tmp_path / "parts", "tent", model=decisive_vit(), options=options, resume=True)
    assert (tmp_path / "parts/predictions.jsonl").read_bytes() == (tmp_path / "whole/predictions.jsonl").read_bytes()


def test_an_evaluation_smooths_the_methods_that_are_named_so(tmp_path: Path) -> None:
    for number, name in enumerate(CLASS_NAMES):
        draw_folder(tmp_path / "tree/fog/5" / name, [number] * 10)
    options = EvalOptions(order="stored", batch_size=10)
    dataset = open_tree(tmp_path / "tree")
    evaluate(decisive_vit(), dataset, tmp_path / "out", methods=["source", "source+smooth"], options=options)
    rows = rows_of(tmp_path / "out")
    alone, smoothed = ([row for row in rows if row["method"] == name] for name in ("source", "source+smooth"))
    assert any("raw" in row for row in smoothed) and not any("raw" in row for row in alone)
    assert [row.get("raw", row)["class"] for row in smoothed] == [row["class"] for row in alone]


def test_smoothing_is_off_or_auto() -> None:
    with pytest.raises(UsageError, match="smooth must be off or auto"):
        RunOptions(smooth="on")  # type: ignore[arg-type]
