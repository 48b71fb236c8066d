"""Learning from every N-th batch only."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from remtta import REM, Adapter, REMConfig
from remtta.errors import UsageError
from remtta.methods.build import build_method
from remtta.methods.table import method_config
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions
from remtta.pipeline.guard import Guard
from remtta.pipeline.pipeline import BETWEEN_UPDATES, Pipeline
from remtta.pipeline.prediction import Update
from tests.conftest import draw_folder, raising, random_images, same_tensors, tiny_vit
from tests.records import record_of, rows_of
from tests.runs.tiny import adapt_in_parts, adapt_tiny

CONFIG = TentConfig(lr=0.05, adapt_every=3)


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    return draw_folder(tmp_path / "frames", range(20), "{:03}.png", 32, 32)


def test_every_third_batch_is_learned_from_and_a_run_continues_bit_for_bit(frames: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"config": CONFIG, "options": {"batch_size": 2}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    adapt_tiny(frames, whole, "tent", **settings)
    rows, counts = rows_of(whole), record_of(whole)["counts"]
    assert [row["adapted"] for row in rows[::2]] == [number % 3 == 0 for number in range(10)]
    assert [row.get("not_adapted") == BETWEEN_UPDATES for row in rows] == [not row["adapted"] for row in rows]
    assert (counts["not_adapted"], counts["updates"]) == (12, 4)
    adapt_in_parts((2, 3), frames, parts, "tent", **settings)
    assert (parts / "predictions.jsonl").read_bytes() == (whole / "predictions.jsonl").read_bytes()


def test_every_caller_follows_the_schedule() -> None:
    pipeline, adapter = REM(tiny_vit(), REMConfig(adapt_every=2)), Adapter(tiny_vit(), batch_size=4, adapt_every=2)
    for number in range(4):
        pipeline(random_images(4, number))
        adapter(random_images(4, number))
    assert (pipeline.method.num_updates, adapter.pipeline.method.num_updates) == (2, 2)


def test_the_first_batch_after_a_reset_is_learned_from(frames: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 2, "reset_every": 4}  # frames that were learned from
    adapt_tiny(frames, tmp_path / "run", "tent", config=CONFIG, options=options)
    assert [row["adapted"] for row in rows_of(tmp_path / "run")[::2]] == [number % 4 in (0, 3) for number in range(10)]


@pytest.mark.parametrize("name", ["tent", "roid"])  # which corrects the prior of its predictions
def test_what_is_only_predicted_takes_one_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = method_config(name, {"lr": 0.05, "adapt_every": 3}, batch_size=4)
    method = build_method(name, tiny_vit(), config)
    pipeline = Pipeline(method, Guard(GuardOptions(answer="both")))
    images = random_images(4)
    pipeline(images)
    assert pipeline.learn() == Update()
    num_source_predictions, adapted = pipeline.num_source_predictions, pipeline.delta()
    monkeypatch.setattr(method.model, "source_logits", raising(AssertionError("a second forward pass")))
    prediction = pipeline.predict(images)
    assert prediction.weight == 0.5 and pipeline.num_source_predictions == num_source_predictions
    assert same_tensors(pipeline.delta(), adapted)
    other = Pipeline(build_method(name, tiny_vit(), config))
    other.load_delta({name: delta / 2 for name, delta in adapted.items()})
    torch.testing.assert_close(prediction.logits, other.predict(images, update=False).logits)


def test_centering_follows_images_that_are_only_predicted() -> None:
    method = build_method("tent", tiny_vit(), dataclasses.replace(CONFIG, center=True))
    pipeline = Pipeline(method, Guard(GuardOptions(answer="both")))
    pipeline(random_images(20))
    offsets, before, images = pipeline.centering.offsets, dict(pipeline.centering.offsets), random_images(20, 2) + 1
    logits = pipeline.predict(images, update=False).logits
    assert not any(torch.allclose(offsets[name], before[name]) for name in before)
    with method.model.weights.between(0.5):
        torch.testing.assert_close(logits, method.model.model(images) - offsets["adapted"])


def test_updates_that_do_not_last_are_not_left_out(frames: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with adapt_every=2, updates must last"):
        adapt_tiny(frames, tmp_path / "run", "tent", config=TentConfig(episodic=True, adapt_every=2))
