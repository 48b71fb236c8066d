"""Pictures of an evaluation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from remtta.lab.drawing import running_error
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.plots import draw_plots, draw_reliability, draw_running_error
from remtta.lab.evaluation.tally import tally_rows
from tests.lab.evaluation.trees import evaluate_tiny, methods_of


def test_pictures_are_drawn_for_every_method(tree: Dataset, tmp_path: Path) -> None:
    odd = replace(tree, domains=[replace(tree.domains[0], name="a $\\frac{$"), *tree.domains[1:]])
    results = evaluate_tiny(odd, tmp_path / "run", methods_of("source", "rem", lr=0.01))
    with rc_context({"text.usetex": True}):  # as in the matplotlibrc of some
        draw_plots(tmp_path / "run", results)
    drawn = list((tmp_path / "run" / "plots").iterdir())
    assert {path.stem for path in drawn} == {"error_per_domain", "running_error", "reliability"}
    for path in drawn:
        with Image.open(path) as picture:
            assert picture.width > 300


def test_the_running_error_has_images_of_its_own_domain_only() -> None:
    # A window of 25 images, twelve before and twelve after; at the ends those that exist.
    missed = [True] * 40 + [False] * 60
    curve = running_error(missed, 25)
    assert len(curve) == 100
    assert curve[[0, 27, 40, 52, 99]].tolist() == [100, 100, 100 * 12 / 25, 0, 0]
    curve = running_error([True] * 20 + [False] * 80, 80)  # as the demo asks for: 40 before and 40 after
    assert curve[[0, 30, 99]].tolist() == [50.0, 100 * 20 / 70, 0.0]


@pytest.mark.parametrize(
    ("images", "shown"),
    [
        # Of 60 images, the first point is the mean of 50: 100 * sqrt(0.25 / 50) = 7.07 points; of 100 of 4,000, 5.
        (60, "mean of the 100 images\naround each in its domain, standard error up to 7"),
        (4000, "mean of the 200 images\naround each in its domain, standard error up to 5"),
    ],
)
def test_the_running_error_tells_its_window_and_shows_the_source_below_a_method_with_the_same_errors(
    images: int, shown: str, tmp_path: Path
) -> None:
    row = {"seed": 0, "phase": "adapt", "visit": 0, "domain": "fog", "label_true": 1}
    rows = [
        {**row, "method": name, "class": place % 2, "source": str(place)}
        for name in ("source", "tent")
        for place in range(images)
    ]
    (tmp_path / "predictions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    methods: dict[str, Any] = {name: {"seeds": {"0": {}}} for name in ("source", "tent")}
    [axes] = draw_running_error(Figure(), tmp_path, methods, {"source": "grey", "tent": "orange"}).axes
    assert axes.get_ylabel() == f"error in %: {shown}"
    source, tent = axes.lines[:2]
    assert np.array_equal(source.get_xydata(), tent.get_xydata()) and np.asarray(tent.get_ydata())[20] == 50
    assert source.get_zorder() < tent.get_zorder() and source.get_linewidth() > 2 * tent.get_linewidth()


def test_reliability_tells_how_many_predictions_a_bar_stands_for(tree: Dataset, tmp_path: Path) -> None:
    figure = Figure()
    methods = evaluate_tiny(tree, tmp_path / "run")["methods"]
    tallies = tally_rows(tmp_path / "run" / "predictions.jsonl")
    for tally in tallies.values():
        tally.bins[-2:] += [[1, 0.95, 1], [2, 2.0, 1]]  # certain ones are in the last bar
    [axes] = draw_reliability(figure, tallies, methods, {"source": "grey"}).axes
    counts = [int(text.get_text()) for text in axes.texts]
    assert len(counts) == len(axes.patches) and sum(counts) == 42 + 6
    assert axes.get_title() == f"source, ECE {100 * methods['source']['ece']:.1f} %"
    assert counts[-1] >= 6 and axes.texts[-1].get_position()[0] == pytest.approx(14.5 / 15)
