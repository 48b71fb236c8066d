"""What an evaluation leaves in its rows, records and files, and in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from remtta.config import MethodConfig, RDumbConfig, REMConfig, SourceConfig, VDPConfig
from remtta.deltas import load_delta
from remtta.errors import StreamError
from remtta.evaluation import evaluate
from remtta.evaluation.datasets import Dataset
from remtta.methods.rem import REM
from remtta.options import EvalOptions, GuardOptions
from tests.conftest import NUM_CLASSES, draw_image, tiny_vit
from tests.test_evaluation import open_tree, rows_of

SOON_RETIRED = GuardOptions(size=24, least=12, cost=1.0, most_drift=0.1, doubt=0.01, alarm=0.02, retries=0)


def write_domain(folder: Path, images: int, first: int = 0) -> None:
    for number in range(images):
        path = folder / f"class_{number % NUM_CLASSES}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_image(first + number, 32, 32).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Dataset:
    """Two domains of 28 images, which batches of 8 do not divide."""
    write_domain(tmp_path / "c" / "snow", 28)
    write_domain(tmp_path / "c" / "fog", 28, first=1000)
    return open_tree(tmp_path / "c")


def run_guarded(tree: Dataset, folder: Path, **changes: Any) -> Any:
    """The record of a run that soon does harm."""
    options = EvalOptions(batch_size=8, guard=SOON_RETIRED, **changes)
    results = evaluate(tiny_vit(), tree, folder, methods={"rem+guard": REMConfig(lr=0.05)}, options=options)
    return results["methods"]["rem+guard"]["seeds"]["0"]


# --- The guard ---------------------------------------------------------------------------------------------------


def test_rows_have_views_only_where_the_method_saw_their_images(
    tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = REM.__call__, []

    def counted(self: REM, images: Tensor, labels: Tensor | None = None) -> Tensor:
        seen.append(len(images))
        return step(self, images, labels)

    monkeypatch.setattr(REM, "__call__", counted)
    assert run_guarded(tree, tmp_path / "run")["guard"]["retired"]
    assert [row["index"] for row in rows_of(tmp_path / "run") if "tvd" in row] == list(range(sum(seen)))
    assert 0 < sum(seen) < 28


def test_a_retired_guard_has_the_source_answer_in_tests_without_learning_too(tree: Dataset, tmp_path: Path) -> None:
    run = run_guarded(tree, tmp_path / "run", unseen=("fog",), revisit=True)
    rows = rows_of(tmp_path / "run")
    tested = [row for row in rows if row["phase"] != "adapt"]
    assert len(tested) == 56
    assert all((row["answered_by"], row["update"]) == ("source", 0) for row in tested)
    assert run["guard"]["answered_by_source"] == sum("answered_by" in row for row in rows)


# --- Images that cannot be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["continual", "mixed"])
def test_a_domain_of_which_no_image_can_be_read_is_told(scenario: str, tree: Dataset, tmp_path: Path) -> None:
    [fog] = [domain for domain in tree.domains if domain.name == "fog"]
    for source in fog.sources:
        Path(source).write_bytes(b"no image")
    for resume in (False, True):
        options = EvalOptions(on_error="skip", batch_size=8, scenario=scenario, resume=resume)
        with pytest.raises(StreamError, match=r"^fog: none of its 28 image\(s\) could be read \(see predictions.jsonl"):
            evaluate(tiny_vit(), tree, tmp_path / "run", methods={"source": SourceConfig()}, options=options)


# --- Records -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["scenario", "config", "rdumb"])
def test_deltas_count_from_the_last_reset_and_results_count_all(by: str, tree: Dataset, tmp_path: Path) -> None:
    method: dict[str, MethodConfig] = {"rem": REMConfig(episodic=by == "config")}
    if by == "rdumb":
        method = {"rdumb": RDumbConfig(entropy_margin=9.0, max_cosine=9.0, reset_every_steps=3)}
    options = EvalOptions(batch_size=8, scenario="episodic" if by == "scenario" else "continual")
    [run] = evaluate(tiny_vit(), tree, tmp_path / "run", methods=method, options=options)["methods"].values()
    delta = load_delta(tmp_path / "run" / "deltas" / f"{next(iter(method))}_seed0.safetensors")
    rows = rows_of(tmp_path / "run")
    # 28 images are batches of 8, 8, 8 and 4, twice; RDumb forgets the third and the sixth of the eight.
    counts = {"scenario": (28, 4, 56, 8), "config": (4, 1, 56, 8), "rdumb": (12, 2, 40, 8)}
    assert (delta.frames, delta.updates) == counts[by][:2]
    assert (run["seeds"]["0"]["adapted_images"], run["seeds"]["0"]["updates"]) == counts[by][2:]
    assert sum(row["adapted"] for row in rows) == counts[by][2]
    assert by != "config" or not any(row["update"] for row in rows)


def test_trained_numbers_are_told_also_where_they_are_no_weights(tree: Dataset, tmp_path: Path) -> None:
    methods = {"source": SourceConfig(), "vdp": VDPConfig()}
    results = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods)["methods"]
    # Two prompts of 3 x 8 x 8.
    assert [content["trainable_parameters"] for content in results.values()] == [0, 384]
