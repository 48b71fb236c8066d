"""Pictures of an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from remtta.evaluation import evaluate
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.plots import draw_plots
from remtta.models.labels import labels_of
from remtta.models.preprocessing import preprocessing_of
from remtta.options import EvalOptions
from tests.conftest import tiny_vit
from tests.evaluation.trees import CLASSES, methods_of


def test_pictures_are_drawn_for_every_method(tree: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = tiny_vit()
    results = evaluate(model, tree, tmp_path / "run", methods=methods_of("source", "rem", lr=0.01))
    drawn = draw_plots(tmp_path / "run", results, model, tree, preprocessing_of(model))
    assert {path.stem for path in drawn} == {
        "error_per_domain",
        "running_error",
        "entropy_by_mask_ratio",
        "reliability",
        "masks",
    }
    for path in drawn:
        with Image.open(path) as picture:
            assert picture.width > 300
    assert labels_of(model) == CLASSES


def test_pictures_leave_out_unreadable_images_and_domains_without_an_update(tree: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    Path(tree.domains[0].sources[0]).write_bytes(b"no image")
    model = tiny_vit()
    # Of three batches per domain only the very first is learned from.
    options = EvalOptions(scenario="time-constrained", cost_ratio=100, batch_size=8, on_error="skip")
    results = evaluate(model, tree, tmp_path / "run", methods=methods_of("rem"), options=options)
    drawn = draw_plots(tmp_path / "run", results, model, tree, preprocessing_of(model))
    assert {"entropy_by_mask_ratio", "masks"} <= {path.stem for path in drawn}
