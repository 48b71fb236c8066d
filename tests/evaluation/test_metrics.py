"""Numbers that can be counted by hand."""

from __future__ import annotations

import math

import pytest

from remtta.evaluation.metrics import calibration_bins, diversity, expected_calibration_error, harmonic_mean


def test_the_calibration_error_follows_its_definition() -> None:
    # Bins of width 1/15: 0.90 and 0.92 share one, 0.50 has another, exactly 1 its own.
    probs, correct = [0.9333, 0.92, 0.50, 1.0], [True, False, True, True]
    bins = calibration_bins(probs, correct)
    assert [round(part["share"], 2) for part in bins] == [0.25, 0.5, 0.25]
    expected = 0.25 * abs(1 - 0.5) + 0.5 * abs(0.5 - (0.9333 + 0.92) / 2) + 0.25 * abs(1 - 1)
    assert expected_calibration_error(probs, correct) == pytest.approx(expected)


def test_diversity_and_harmonic_mean() -> None:
    assert diversity([3, 3, 3]) == 0
    assert diversity([0, 1, 2, 3]) == pytest.approx(math.log(4))
    assert harmonic_mean(49.9, 58.8) == pytest.approx(54.0, abs=0.05)  # the source row of the paper's table
