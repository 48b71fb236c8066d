"""The order of images in each scenario."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from remtta.errors import UsageError
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import EvalOptions
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
