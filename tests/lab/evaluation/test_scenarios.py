"""The order of images in each scenario."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from remtta.errors import UsageError
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import EvalOptions, Order
from remtta.lab.evaluation.orders import ORDERS
from remtta.lab.evaluation.scenarios import Visit, dirichlet_order, imbalanced_order, plan_visits
from tests.lab.evaluation.trees import open_tree, write_tree


def titles(dataset: Dataset, visits: Sequence[Visit]) -> list[str]:
    """Return the titles of the domains with which visits begin."""
    return [dataset.domains[visit.items[0, 0]].title for visit in visits]


def test_without_imbalance_classes_mix_and_with_infinite_imbalance_they_run() -> None:
    labels = np.repeat(np.arange(10), 100)
    rng = np.random.default_rng(0)
    runs = imbalanced_order(labels, math.inf, rng)
    assert sorted(runs) == list(range(1000))
    assert [len(set(labels[runs][start : start + 100])) for start in range(0, 1000, 100)] == [1] * 10
    assert labels[runs][::100].tolist() != list(range(10))
    mixed = imbalanced_order(labels, 1, rng)
    assert min(Counter(labels[mixed][:500].tolist()).values()) > 30


def test_an_imbalance_ratio_makes_one_class_that_much_likelier() -> None:
    labels = np.repeat(np.arange(10), 2000)
    order = imbalanced_order(labels, 9.0, np.random.default_rng(0))
    # Of each stretch, 9 / (9 + 9) are of its own class and 1 / 18 of each other one.
    counts = [Counter(labels[order][start : start + 2000].tolist()) for start in range(0, 20_000, 2000)]
    for count in counts[1:-1]:
        (_, most), *others = count.most_common()
        assert most == pytest.approx(1000, rel=0.12)
        assert np.mean([number for _, number in others]) == pytest.approx(1000 / 9, rel=0.12)


def test_a_small_dirichlet_concentration_makes_bursts() -> None:
    labels = np.repeat(np.arange(20), 50)
    changes = []
    for concentration in (0.01, 1000.0):
        order = dirichlet_order(labels, concentration, np.random.default_rng(0))
        assert sorted(order) == list(range(1000))
        changes.append(int((np.diff(labels[order]) != 0).sum()))
    assert changes[0] < 60
    assert changes[1] > 300


def test_scenarios_visit_the_domains_as_they_say(tmp_path: Path) -> None:
    every = (1, 2, 3, 4, 5)
    dataset = open_tree(write_tree(tmp_path / "c", ["fog", "snow"], severities=every, each=1), severities=every)
    gradual = plan_visits(dataset, EvalOptions(scenario="gradual"), 0)
    levels = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert titles(dataset, gradual) == [f"{name}{level}" for name in ("snow", "fog") for level in levels]

    dataset = open_tree(tmp_path / "c")
    episodic = plan_visits(dataset, EvalOptions(scenario="episodic"), 0)
    assert [visit.reset for visit in episodic] == [True, True]
    continual = plan_visits(dataset, EvalOptions(revisit=True), 0)
    expected = [(title, phase) for phase in ("adapt", "revisit") for title in ("snow5", "fog5")]
    assert [(*titles(dataset, [visit]), visit.phase) for visit in continual] == expected
    assert continual[0].items[:, 1].tolist() != list(range(7))
    assert sorted(continual[0].items[:, 1]) == list(range(7))
    again = plan_visits(dataset, EvalOptions(revisit=True), 0)
    assert all(np.array_equal(a.items, b.items) for a, b in zip(continual, again, strict=True))
    other = plan_visits(dataset, EvalOptions(), 1)
    assert not np.array_equal(continual[0].items, other[0].items)
    stored = plan_visits(dataset, EvalOptions(order="stored"), 0)
    assert stored[0].items[:, 1].tolist() == list(range(7))

    [mixed] = plan_visits(dataset, EvalOptions(scenario="mixed"), 0)
    assert sorted(map(tuple, mixed.items.tolist())) == [(domain, number) for domain in (0, 1) for number in range(7)]
    assert int((np.diff(mixed.items[:, 0]) != 0).sum()) > 1

    unseen = plan_visits(dataset, EvalOptions(unseen=("snow",)), 0)
    assert [(*titles(dataset, [visit]), visit.phase) for visit in unseen] == [("fog5", "adapt"), ("snow5", "unseen")]
    with pytest.raises(UsageError, match=r"--unseen frost: not among the domains \(snow, fog\)"):
        plan_visits(dataset, EvalOptions(unseen=("frost",)), 0)
    with pytest.raises(UsageError, match="--unseen leaves no domain to adapt to"):
        plan_visits(dataset, EvalOptions(unseen=("fog", "snow")), 0)
    with pytest.raises(
        UsageError, match=r"not there: snow 1, snow 2, snow 3, snow 4, fog 1 and 3 more; choose another"
    ):
        plan_visits(dataset, EvalOptions(scenario="gradual"), 0)


def test_label_shift_is_by_dirichlet_bursts_where_a_concentration_is_given(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c", ["fog"], each=6))
    orders = {}
    for name, more in (("bursts", {"dirichlet": 0.01}), ("ratio", {"imbalance": 1.0})):
        (visit,) = plan_visits(dataset, EvalOptions(scenario="label-shift", **more), 0)  # type: ignore[arg-type]
        orders[name] = dataset.domains[0].labels[visit.items[:, 1]]
        assert sorted(visit.items[:, 1]) == list(range(len(dataset.domains[0].labels)))
    assert (np.diff(orders["bursts"]) != 0).sum() < (np.diff(orders["ratio"]) != 0).sum()


def test_recurring_domains_come_again_in_another_order_of_images(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c", ["fog", "snow"]))
    visits = plan_visits(dataset, EvalOptions(scenario="recurring", visits=3), 0)
    assert titles(dataset, visits) == ["snow5", "fog5"] * 3
    assert len({tuple(visit.items[:, 1]) for visit in visits[::2]}) == 3
    assert all(sorted(visit.items[:, 1]) == list(range(21)) for visit in visits)
    assert np.array_equal(visits[0].items, plan_visits(dataset, EvalOptions(), 0)[0].items)
    assert len(plan_visits(dataset, EvalOptions(scenario="recurring"), 0)) == 40


def streams(dataset: Dataset, seed: int = 0, **options: Any) -> list[np.ndarray]:
    """Return the labels in the order of each visit."""
    visits = plan_visits(dataset, EvalOptions(**options), seed)
    return [np.array([dataset.domains[number].labels[place] for number, place in visit.items]) for visit in visits]


def test_orders_by_class_are_what_their_names_say(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c", ["fog", "snow"], each=30, size=4))
    for length in (5, 25):
        for labels in streams(dataset, order=f"runs-{length}"):
            ends = [0, *(np.flatnonzero(np.diff(labels)) + 1), len(labels)]
            assert len(labels) == 7 * 30
            assert set(np.diff(ends)) <= ({5, 10, 15, 20} if length == 5 else {5, 10, 25, 30, 50, 55})
    for number, name in enumerate(("one-class", "two-classes", "three-classes"), 1):
        first, second = streams(dataset, order=name)
        assert len(set(first)) == number and set(first) == set(second)
        assert len(first) == max(50, number * 30)  # the images of one class come again
    for seed in range(7):
        found = [set(labels) for labels in streams(dataset, seed, order="other-classes")]
        assert [len(each) for each in found] == [2, 2] and not found[0] & found[1]
        switched = streams(dataset, seed, order="switch")
        for labels in switched:
            assert len(labels) == 100 and len(set(labels[:50])) > 4 and len(set(labels[50:])) == 1
        assert switched[0][-1] != switched[1][-1]
    tails = [np.bincount(labels, minlength=7) for labels in streams(dataset, order="long-tail")]
    assert [tail.sum() for tail in tails] == [42, 42]
    assert all(tail.max() >= 12 and tail.min() <= 2 for tail in tails) and tails[0].argmax() == tails[1].argmax()


def test_the_seed_decides_the_classes_of_a_stream(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c", ["fog", "snow"], each=1))
    assert len({streams(dataset, seed, order="one-class")[0][0] for seed in range(7)}) == 7  # all, one after the other
    again = [plan_visits(dataset, EvalOptions(order="switch", scenario="episodic"), 1) for _ in range(2)]
    assert all(np.array_equal(a.items, b.items) and a.reset for a, b in zip(*again, strict=True))


def test_orders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    write_tree(tmp_path / "c", ["fog"], classes=["class_a", "class_b", "class_c"], each=1)
    root = write_tree(tmp_path / "c", ["snow"], classes=["class_d", "class_e", "class_f", "class_g"], each=1)
    dataset = open_tree(root)
    with pytest.raises(UsageError, match="--order one-class needs 1 of the classes to have images in every domain, an"):
        plan_visits(dataset, EvalOptions(order="one-class"), 0)
    for scenario in ("mixed", "walk", "label-shift"):
        with pytest.raises(UsageError, match=f"--scenario {scenario} draws its own order of the images; leave --order"):
            EvalOptions(scenario=scenario, order="switch")


def test_the_orders_that_options_name_are_there() -> None:
    assert set(get_args(Order)) == {"shuffled", "stored", *ORDERS}


def test_a_walk_goes_from_condition_to_condition_and_shows_each_image_once(tmp_path: Path) -> None:
    levels = (1, 2, 3)
    dataset = open_tree(write_tree(tmp_path / "c", ["fog", "snow"], levels, each=25, size=4), severities=levels)
    [walk] = plan_visits(dataset, EvalOptions(scenario="walk"), 0)
    assert len(walk.items) == len(set(map(tuple, walk.items.tolist()))) == 6 * 7 * 25
    conditions = [dataset.domains[number] for number in walk.items[:, 0]]
    steps = [(domain.name, domain.severity) for domain in conditions]
    steps = [steps[place] for place in range(len(steps)) if place == 0 or steps[place] != steps[place - 1]]
    # 175 images of a condition are three steps of 50 and one of 25: two passages up and down, severity 3 twice in each.
    for (name, severity), (following, level) in pairwise(steps):
        assert abs(severity - level) == 1 if name == following else severity == level == 1
    assert sum(level == 3 for _, level in steps) == 4
    assert [level for _, level in steps[:3]] == [1, 2, 3] and len(set(walk.items[:250, 0])) == 3
