"""Counts verified by hand, and their standard errors."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remtta.lab.evaluation.results import paired_standard_error, standard_error
from remtta.lab.evaluation.tally import Tally, diversity, image_name
from tests.lab.evaluation.trees import tally_of


def row_of(prob: float, right: bool, predicted: int = 3, **more: Any) -> dict[str, Any]:
    truth = predicted if right else 4
    return {"source": "a/1.png", "prob": prob, "class": predicted, "label_true": truth, "rank_true": 1} | more


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
    total, whole = Tally.total(parts), Tally.of(rows, numbers)
    for name, value in vars(whole).items():
        np.testing.assert_allclose(getattr(total, name), value, err_msg=name)
    assert len(whole) == 60 and whole.summary()["tvd"] == pytest.approx(sum(row["tvd"] for row in rows) / 60)
    for number in range(4):
        predictions = [row["class"] for row in rows if row["label_true"] == number]
        assert (whole.num_true[number], whole.num_right[number]) == (len(predictions), predictions.count(number))
        assert whole.num_predicted[number] == sum(row["class"] == number for row in rows)


def test_the_diversity_is_the_entropy_of_the_predicted_classes() -> None:
    assert diversity(np.array([0, 3])) == 0
    assert diversity(np.array([1, 1, 0, 1, 1])) == pytest.approx(math.log(4))


NUMBERS: dict[str, int] = {}
RIGHT = {"label_true": 1, "rank_true": 1, "prob": 0.5}


def tally(right: str, names: Sequence[str] | None = None) -> Tally:
    """Return a tally with one prediction per character: 1 is right, 0 wrong."""
    names = names or [f"image {number}" for number in range(len(right))]
    rows = [{"source": name, "class": int(sign), **RIGHT} for name, sign in zip(names, right, strict=True)]
    return Tally.of(rows, NUMBERS)


def test_domains_of_other_images_make_the_mean_surer_and_those_of_the_same_do_not() -> None:
    fog, other = tally("1100"), tally("1100", names="abcd")
    # One domain: sqrt(0.25 / 4) = 25 points. Two independent ones: 25 / sqrt(2).
    assert standard_error([{"fog": fog, "snow": other}], ["fog", "snow"]) == pytest.approx(25 / math.sqrt(2))
    assert standard_error([{"fog": fog, "snow": tally("1100")}], ["fog", "snow"]) == pytest.approx(25)
    # Right in one where it is wrong in the other: every image has the mean error.
    assert standard_error([{"fog": fog, "snow": tally("0011")}], ["fog", "snow"]) == pytest.approx(0)


def test_domains_of_unequal_size_count_by_their_share_in_the_mean() -> None:
    # u = (x - 1/2) / (2 * 2) twice, and (x - 1/2) / (2 * 4) four times: 2 / 64 + 4 / 256.
    runs = [{"fog": tally("10", names="ab"), "snow": tally("1100", names="cdef")}]
    assert standard_error(runs, ["fog", "snow"]) == pytest.approx(100 * math.sqrt(2 / 64 + 4 / 256))


def test_a_difference_is_as_sure_as_mcnemar_has_it() -> None:
    source, method = {"fog": tally("0001111111")}, {"fog": tally("1110011111")}
    # Three that only the source gets wrong, two that only the method does, of ten.
    assert paired_standard_error([source], [method], ["fog"]) == pytest.approx(100 * math.sqrt(3 + 2) / 10)
    assert paired_standard_error([source], [source], ["fog"]) == 0
    # The same images in two domains: one is better in both, one better and worse, which moves the mean by nothing.
    sources = {"fog": tally("0011"), "snow": tally("0111")}
    methods = {"fog": tally("1111"), "snow": tally("1011")}
    assert paired_standard_error([sources], [methods], ["fog", "snow"]) == pytest.approx(100 * 2 / 8)


def test_images_that_only_one_method_could_read_are_left_out() -> None:
    source, method = tally("0101", names="abcd"), tally("111", names="bcd")
    assert paired_standard_error([{"fog": source}], [{"fog": method}], ["fog"]) == pytest.approx(100 / 3)


def test_an_image_has_one_name_in_all_corruptions_and_one_number_in_all_severities(tmp_path: Path) -> None:
    assert image_name("c/fog/5/class_a/1.png") == image_name("c/snow/3/class_a/1.png") == "class_a/1.png"
    assert image_name(r"c\fog\5\class_a\1.png") == "class_a/1.png"
    rows = {4: {"40001": 0, "40000": 1, "40003": 0}, 1: {"1": 0, "0": 1}}  # predictions by severity and row
    tallies = tally_of(
        tmp_path,
        *(
            {"domain": "fog", "severity": severity, "source": f"c/fog.npy[{row}]", "class": predicted, **RIGHT}
            for severity, of_rows in rows.items()
            for row, predicted in of_rows.items()
        ),
    )
    assert {key.severity: (tally.num_predictions.tolist(), tally.wrong.tolist()) for key, tally in tallies.items()} == {
        4: ([1, 1, 0, 1], [0, 1, 0, 1]),
        1: ([1, 1], [0, 1]),
    }


@pytest.mark.parametrize("by_path", [False, True])
def test_images_of_a_list_may_have_the_same_names_in_several_folders(by_path: bool, tmp_path: Path) -> None:
    images = [
        {"domain": "list", "source": f"{camera}/frames/1.png", "class": number, **RIGHT}
        for number, camera in enumerate("ab")
    ]
    [tally, _] = tally_of(tmp_path, *images, by_path=by_path).values()
    assert tally.num_predictions.tolist() == ([1, 1] if by_path else [2])


def test_the_first_images_of_an_array_keep_their_places(tmp_path: Path) -> None:
    rows = [
        {"domain": "fog", "severity": 5, "source": f"c/fog.npy[{row}]", "class": int(row < 40010), **RIGHT}
        for row in (*range(40010, 40060), *range(40000, 40010))  # the first of the severity come last
    ]
    whole, first = tally_of(tmp_path, *rows).values()
    assert (len(whole), len(first)) == (60, 50)
    assert first.num_predictions.tolist() == [0] * 10 + [1] * 50
    assert paired_standard_error([{"fog": whole}], [{"fog": first}], ["fog"]) == 0  # the same predictions
