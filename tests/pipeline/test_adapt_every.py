"""Learning from every N-th batch only."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from remtta.guard.guard import Guard
from remtta.guard.observed import BETWEEN_UPDATES, ObservedMethod
from remtta.methods.method import build_method

from remtta.errors import UsageError
from remtta.methods.settings import method_config
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions
from tests.conftest import draw_folder, random_images, tiny_vit
from tests.guard.asking import ask
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


def test_the_first_batch_after_a_reset_is_learned_from(frames: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 2, "reset_every": 4}  # frames that were learned from
    adapt_tiny(frames, tmp_path / "run", "tent", config=CONFIG, options=options)
    assert [row["adapted"] for row in rows_of(tmp_path / "run")[::2]] == [number % 4 in (0, 3) for number in range(10)]


@pytest.mark.parametrize("name", ["tent", "roid"])  # which corrects the prior of its predictions
def test_what_is_only_predicted_takes_one_forward_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = method_config(name, {"lr": 0.05, "adapt_every": 3}, batch_size=4)
    method = build_method(name, tiny_vit(), config)
    images = random_images(4)
    method(images)
    guard = Guard(method, GuardOptions(answer="both"))
    adapted = method.delta()
    halves = {name: delta / 2 for name, delta in adapted.items()}
    monkeypatch.setattr(method.net.weights, "at_source", None)
    answers = ask(guard, images, learn=False)
    assert answers.weight == 0.5 and guard.num_source_predictions == 0
    assert all(torch.equal(delta, method.delta()[name]) for name, delta in adapted.items())
    other = build_method(name, tiny_vit(), config)
    other.load_delta(halves)
    torch.testing.assert_close(answers.logits, other.predict(images))


def test_centring_follows_images_that_are_only_predicted() -> None:
    method = build_method("tent", tiny_vit(), dataclasses.replace(CONFIG, centre=True))
    observed = ObservedMethod(method, [Guard(method, GuardOptions(answer="both"))])
    observed.predict(random_images(20))
    before, images = method.net.source_centre.offset, random_images(20, 2) + 1
    logits = observed.predict(images, left_out=True).logits
    assert not torch.allclose(method.net.source_centre.offset, before)
    with method.net.weights.between(0.5):
        torch.testing.assert_close(logits, method.net.model(images) - method.net.centre.offset)


def test_updates_that_do_not_last_are_not_left_out(frames: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="with adapt_every=2, updates must last"):
        adapt_tiny(frames, tmp_path / "run", "tent", config=TentConfig(episodic=True, adapt_every=2))
