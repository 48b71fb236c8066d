"""Standard errors by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from remtta.evaluation.metrics import Tally, image_name
from remtta.evaluation.results import tally_rows
from remtta.evaluation.uncertainty import paired_standard_error, standard_error

NUMBERS: dict[str, int] = {}


def tally(right: str, names: Sequence[str] | None = None) -> Tally:
    """One prediction per sign: 1 is right, 0 wrong."""
    names = names or [f"image {place}" for place in range(len(right))]
    rows = [
        {"source": name, "class": int(sign), "label_true": 1, "prob": 0.5}
        for name, sign in zip(names, right, strict=True)
    ]
    return Tally.of(rows, NUMBERS)


def test_in_one_domain_it_is_the_binomial_one() -> None:
    # p = 0.25, n = 4: sqrt(0.25 * 0.75 / 4)
    assert standard_error([{"fog": tally("1101")}], ["fog"]) == pytest.approx(100 * math.sqrt(0.1875 / 4))
    assert standard_error([{"fog": tally("1111")}], ["fog"]) == 0


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


def test_more_seeds_of_the_same_images_do_not_make_it_surer() -> None:
    assert standard_error([{"fog": tally("1100")}] * 3, ["fog"]) == pytest.approx(25)
    # Images that are right half of the time: 0, 1/2, 1/2, 1 about 1/2, so sqrt((1/4 + 1/4) / 16).
    runs = [{"fog": tally("1100")}, {"fog": tally("1010")}]
    assert standard_error(runs, ["fog"]) == pytest.approx(100 * math.sqrt(0.5) / 4)


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
    common = {"method": "source", "seed": 0, "phase": "adapt", "domain": "fog", "label_true": 1, "prob": 0.5}
    asked = {4: {"40001": 0, "40000": 1, "40003": 0}, 1: {"1": 0, "0": 1}}
    rows = [
        common | {"severity": severity, "source": f"c/fog.npy[{row}]", "class": right}
        for severity, of_rows in asked.items()
        for row, right in of_rows.items()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = tally_rows(tmp_path / "rows.jsonl")["source", 0]["adapt"]
    assert {place: (own.asked.tolist(), own.wrong.tolist()) for place, own in places.items()} == {
        ("fog", 4): ([1, 1, 0, 1], [0, 1, 0, 1]),
        ("fog", 1): ([1, 1], [0, 1]),
    }
