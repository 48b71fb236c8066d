"""Pictures of an evaluation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from remtta.lab.drawing import running_error
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.plots import draw_plots, draw_reliability
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
    # 100 images: a window of 25, twelve before and twelve after; at the ends what there is of it.
    missed = [True] * 40 + [False] * 60
    curve = running_error(missed)
    assert len(curve) == 100
    assert curve[[0, 27, 40, 52, 99]].tolist() == [100, 100, 100 * 12 / 25, 0, 0]
    # Of a short domain at least 20, and of a long one 200.
    assert running_error([True] + [False] * 24)[[0, 10, 11]].tolist() == [10, 5, 0]
    assert np.flatnonzero(running_error([True] + [False] * 1999)).tolist() == list(range(101))
    curve = running_error([True] * 20 + [False] * 80, 80)  # as the demo asks for: 40 before and 40 after
    assert curve[[0, 30, 99]].tolist() == [50.0, 100 * 20 / 70, 0.0]


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
