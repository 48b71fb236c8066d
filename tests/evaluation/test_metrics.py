"""Numbers that can be counted by hand."""

from __future__ import annotations

import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remtta.evaluation import results
from remtta.evaluation.metrics import Tally, diversity, harmonic_mean


def row_of(prob: float, right: bool, predicted: int = 3, **more: Any) -> dict[str, Any]:
    return {"source": "a/1.png", "prob": prob, "class": predicted, "label_true": predicted if right else 4} | more


def test_the_calibration_error_follows_its_definition() -> None:
    # Bins of width 1/15: 0.90 and 0.92 share one, 0.50 has another, exactly 1 its own.
    tally = Tally.of([row_of(0.9333, True), row_of(0.92, False), row_of(0.50, True), row_of(1.0, True)], {})
    assert tally.reliability()[:2].tolist() == [[7, 13, 15], [1, 2, 1]]
    expected = 0.25 * abs(1 - 0.5) + 0.5 * abs(0.5 - (0.9333 + 0.92) / 2) + 0.25 * abs(1 - 1)
    assert tally.calibration_error == pytest.approx(expected)


def test_tallies_add_up_to_that_of_all_rows() -> None:
    draw = random.Random(0)
    rows = [
        row_of(draw.random(), draw.random() < 0.6, draw.randrange(4), source=f"a/{draw.randrange(9)}.png")
        | {"rank_true": draw.randrange(9), "tvd": draw.random(), "entropies": [draw.random(), draw.random()]}
        for _ in range(60)
    ]
    numbers: dict[str, int] = {}
    parts = [Tally.of(rows[:7], numbers), Tally.of(rows[7:20], numbers), Tally.of(rows[20:], numbers)]
    together, whole = sum(parts, Tally()), Tally.of(rows, numbers)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(together, name), value, err_msg=name)
    assert len(whole) == 60 and whole.summary()["tvd"] == pytest.approx(sum(row["tvd"] for row in rows) / 60)
    pairs = [(row["label_true"], row["class"]) for row in rows]
    assert whole.confusion.T.tolist() == [[*pair, pairs.count(pair)] for pair in sorted(set(pairs))]


def test_memory_grows_with_images_and_not_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"method": "rem", "seed": 0, "phase": "adapt", "domain": "fog", "severity": 5, "rank_true": 2, "tvd": 0.1}
    rows = [
        common
        | row_of(number / 1000, number % 3 == 0, number % 50, source=f"c/{number % 50}/{number}.png")
        | {"entropies": [0.5, 0.25]}
        for number in range(1000)
    ]
    monkeypatch.setattr(results, "read_rows", lambda path: (row for _ in range(200) for row in rows))
    tracemalloc.start()
    [places] = results.tally_rows(Path())["rem", 0].values()
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(places["fog", 5]) == 200_000 and places["fog", 5].asked.tolist() == [200] * 1000
    assert kept < 0.5e6 and peak < 4e6  # as lists it was some 50 MB


def test_diversity_and_harmonic_mean() -> None:
    assert diversity(np.array([3])) == 0
    assert diversity(np.array([1, 1, 1, 1])) == pytest.approx(math.log(4))
    assert harmonic_mean(49.9, 58.8) == pytest.approx(54.0, abs=0.05)  # the source row of the paper's table
