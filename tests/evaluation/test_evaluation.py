"""Evaluations on hand-made trees and arrays whose answers can be counted."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from remtta.errors import OutputError, RemttaError, StreamError, UsageError
from remtta.evaluation import evaluate, plots
from remtta.evaluation.classes import map_classes, read_class_map
from remtta.evaluation.datasets import Dataset, open_dataset, read_image_list
from remtta.evaluation.domains import STANDARD, default_order
from remtta.evaluation.metrics import calibration_bins, diversity, expected_calibration_error, harmonic_mean
from remtta.evaluation.plots import draw_plots
from remtta.evaluation.protocols import choose_preprocessing
from remtta.evaluation.results import markdown_table, plain_table
from remtta.evaluation.scenarios import dirichlet_order, imbalanced_order, plan_visits
from remtta.methods import rem as rem_module
from remtta.methods.losses import rem_loss
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, REMConfig
from remtta.models.classes import restrict_classes
from remtta.models.labels import labels_of
from remtta.models.preprocessing import preprocessing_of
from remtta.options import EvalOptions
from remtta.runs.interrupts import Interrupts, Stopped
from tests.cli.test_commands import remtta_here
from tests.conftest import NUM_CLASSES, TINY, TINY_OPTIONS, draw_image, random_images, tiny_vit

CLASSES = [f"class_{letter}" for letter in "abcdefg"]


def write_tree(
    root: Path,
    domains: Sequence[str] = ("gaussian_noise", "fog", "my_own"),
    severities: Sequence[int] = (5,),
    classes: Sequence[str] = CLASSES,
    each: int = 3,
    size: int = 32,
) -> Path:
    """An ImageNet-C-like tree; without severities a tree of domains."""
    for place, domain in enumerate(domains):
        for severity in severities or (0,):
            for number, name in enumerate(classes):
                folder = root / domain / (str(severity) if severities else "") / name
                folder.mkdir(parents=True)
                for copy in range(each):
                    seed = place * 10_000 + severity * 1000 + number * 10 + copy
                    draw_image(seed, size, size).save(folder / f"{copy}.png")
    return root


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def methods_of(*names: str, **changes: Any) -> dict[str, MethodConfig]:
    return {name: METHOD_CONFIGS[name](**changes) for name in names}


def open_tree(root: Path, **changes: Any) -> Dataset:
    return open_dataset(root, num_classes=NUM_CLASSES, **changes)


# --- What is on disk ---------------------------------------------------------------------------------------------


def test_an_imagenet_c_tree_comes_in_the_standard_order_with_its_classes(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c"))
    assert [domain.title for domain in dataset.domains] == ["gaussian_noise5", "fog5", "my_own5"]
    assert dataset.domains[1].labels.tolist() == [number for number in range(7) for _ in range(3)]
    assert dataset.sizes == {(32, 32): 63}
    assert dataset.report() == (
        f"{tmp_path / 'c'}: ImageNet-C tree, 3 domain(s), 63 images, 32x32 pixels, 7 classes by alphabetical order"
    )


@pytest.mark.parametrize(
    ("names", "all_", "expected"),
    [
        (["fog", "shot_noise", "saturate"], False, ["shot_noise", "fog"]),
        (["fog", "shot_noise", "saturate"], True, ["shot_noise", "fog", "saturate"]),
        (["saturate", "spatter"], False, ["spatter", "saturate"]),
        (["b10", "b2", "fog_3d", "near_focus"], False, ["near_focus", "fog_3d", "b2", "b10"]),
        (list(reversed(STANDARD)), False, list(STANDARD)),
    ],
)
def test_domains_have_the_fields_order(names: list[str], all_: bool, expected: list[str]) -> None:
    assert default_order(iter(names), all_) == expected


@pytest.mark.parametrize(
    ("make", "layout", "titles"),
    [
        (lambda root: write_tree(root, severities=()), "tree of domains", ["gaussian_noise", "fog", "my_own"]),
        (lambda root: write_tree(root, ["."], severities=()), "one domain of class folders", ["data"]),
        (lambda root: write_tree(root, ["."], severities=(3, 5)), "one corruption by severity", ["data5"]),
        (
            lambda root: write_tree(root, ["noise/gaussian_noise", "weather/fog"]),
            "ImageNet-C tree in groups",
            ["gaussian_noise5", "fog5"],
        ),
    ],
)
def test_layouts_are_told_apart(make: Callable[[Path], Path], layout: str, titles: list[str], tmp_path: Path) -> None:
    dataset = open_tree(make(tmp_path / "data"))
    assert (dataset.layout, [domain.title for domain in dataset.domains]) == (layout, titles)


def write_arrays(root: Path, rows: int = 4, short_labels: bool = False) -> Path:
    root.mkdir()
    rng = np.random.default_rng(0)
    for name in ("fog", "gaussian_noise"):
        np.save(root / f"{name}.npy", rng.integers(256, size=(5 * rows, 32, 32, 3), dtype=np.uint8))
    labels = np.arange(rows if short_labels else 5 * rows) % NUM_CLASSES
    np.save(root / "labels.npy", labels.astype(np.uint8))
    return root


@pytest.mark.parametrize("short_labels", [False, True])
def test_rows_of_an_array_belong_to_their_severity(short_labels: bool, tmp_path: Path) -> None:
    root = write_arrays(tmp_path / "c10", short_labels=short_labels)
    dataset = open_tree(root, severities=(2, 5), domains=["fog"])
    second, fifth = dataset.domains
    assert (second.title, fifth.title) == ("fog2", "fog5")
    assert second.labels.tolist() == ([0, 1, 2, 3] if short_labels else [4, 5, 6, 0])
    pixels = np.load(root / "fog.npy")
    assert np.array_equal(np.asarray(fifth.load(1)), pixels[17])
    assert fifth.sources[1] == f"{root / 'fog.npy'}[17]"
    assert not dataset.shuffled
    with pytest.raises(UsageError, match="leave --image-list, --class-map out"):
        open_tree(root, image_list=["class_a/0.png"])


def _spoil(content: np.ndarray, name: str) -> Callable[[Path], object]:
    return lambda root: np.save(root / name, content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil(np.zeros((20, 32, 32), np.uint8), "fog.npy"), "fog.npy must hold 5 severities"),
        (_spoil(np.zeros((20, 32, 32, 3), np.float32), "fog.npy"), "fog.npy must hold 5 severities"),
        (_spoil(np.zeros((15, 32, 32, 3), np.uint8), "fog.npy"), "has 15 images, but labels.npy has 20 labels"),
        (_spoil(np.full(20, 7), "labels.npy"), "names class 7, but the model has 7"),
        (_spoil(np.zeros((20, 2), np.int64), "labels.npy"), "must hold one whole number per image"),
        (lambda root: (root / "fog.npy").write_bytes(b"no array"), "fog.npy cannot be read as an array"),
        (lambda root: [path.unlink() for path in root.glob("[fg]*.npy")], "has labels.npy but no"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    root = write_arrays(tmp_path / "c10")
    spoil(root)
    with pytest.raises(RemttaError, match=message):
        open_tree(root)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"domains": ["fog", "snow"]}, UsageError, r"no domain snow; it has gaussian_noise, fog, my_own; name"),
        ({"severities": (3,)}, UsageError, "has no severity 3; it has 5"),
        ({"class_map": dict.fromkeys(CLASSES[1:], 0)}, UsageError, "1 class folder.s. are not in .*: class_a"),
        ({"class_map": dict.fromkeys(CLASSES, 7)}, UsageError, "beyond the model's 7 classes"),
        ({"image_list": ["class_a/0.png", "class_a/9.png"]}, UsageError, "lacks 1 of .* 2 images, such as class_a/9"),
    ],
)
def test_what_is_missing_is_told_before_any_work(
    changes: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    root = write_tree(tmp_path / "c")
    with pytest.raises(kind, match=message):
        open_tree(root, **changes)


def test_an_empty_domain_and_a_tree_without_labels_are_refused(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "c")
    for path in (root / "fog" / "5").rglob("*.png"):
        path.unlink()
    with pytest.raises(StreamError, match="fog5 is empty"):
        open_tree(root)
    for number in range(2):
        (tmp_path / "bare" / "fog" / str(number + 1)).mkdir(parents=True)
        draw_image(0).save(tmp_path / "bare" / "fog" / str(number + 1) / "a.png")
    with pytest.raises(UsageError, match=r"without class folders.* remtta adapt needs none"):
        open_tree(tmp_path / "bare")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(StreamError, match="no images"):
        open_tree(tmp_path / "nothing")


def test_domains_of_unequal_size_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = write_tree(tmp_path / "c", ["fog", "snow"])
    (root / "fog" / "5" / "class_a" / "0.png").unlink()
    open_tree(root)
    assert caplog.messages[0].startswith(f"13 of the 15 standard corruptions are not in {root}: gaussian_noise, ")
    assert caplog.messages[1:] == ["the domains differ in their number of images: snow5 21, fog5 20"]


def test_a_tree_of_ones_own_may_have_a_fog_and_no_snow(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for domain in ("fog", "night"):
        for name in CLASSES:
            (tmp_path / domain / name).mkdir(parents=True)
            draw_image(0).save(tmp_path / domain / name / "0.png")
    assert [domain.name for domain in open_tree(tmp_path).domains] == ["fog", "night"]
    assert not caplog.messages


def test_a_limit_takes_the_same_images_of_every_domain(tmp_path: Path) -> None:
    dataset = open_tree(write_tree(tmp_path / "c"), limit=8)
    names = [["/".join(source.split("/")[-2:]) for source in domain.sources] for domain in dataset.domains]
    assert [len(each) for each in names] == [8, 8, 8]
    assert names[0] == names[1] == names[2]


def test_an_image_list_gives_the_images_and_their_order(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("val/class_c/1.png 2\nclass_a/0.png\n\nclass_b/2.png\n")
    names = read_image_list(tmp_path / "list.txt")
    dataset = open_tree(write_tree(tmp_path / "c"), image_list=names)
    for domain in dataset.domains:
        assert [Path(source).parent.name + Path(source).name for source in domain.sources] == [
            "class_c1.png",
            "class_a0.png",
            "class_b2.png",
        ]
        # Only three of the seven folders are in use, and still each has its own number.
        assert domain.labels.tolist() == [2, 0, 1]
    (tmp_path / "bare.txt").write_text("0.png\n")
    with pytest.raises(UsageError, match="needs lines such as"):
        read_image_list(tmp_path / "bare.txt")


# --- Classes -----------------------------------------------------------------------------------------------------


def test_wnids_are_mapped_by_wnid_and_never_by_position() -> None:
    mapped = map_classes(["n01443537", "n15075141", "n01440764"], num_classes=1000)
    assert mapped.numbers == {"n01440764": 0, "n01443537": 1, "n15075141": 999}
    assert mapped.how == "wnid"
    with pytest.raises(UsageError, match="wnids, but the model has 7 classes; give --class-map"):
        map_classes(["n01443537"], num_classes=7)
    with pytest.raises(UsageError, match=r"1 class folder\(s\) are not in ImageNet's wnids: n00000000"):
        map_classes(["n01443537", "n00000000"], num_classes=1000)


def test_numbers_names_and_alphabetical_order() -> None:
    assert map_classes(["10", "2", "999"], num_classes=1000).numbers == {"10": 10, "2": 2, "999": 999}
    labels = ["Stop sign", "give_way", "bend right"]
    assert map_classes(["give way", "stop_sign"], num_classes=3, labels=labels).numbers == {
        "give way": 1,
        "stop_sign": 0,
    }
    assert map_classes(["b", "c", "a"], num_classes=3).numbers == {"a": 0, "b": 1, "c": 2}
    with pytest.raises(UsageError, match=r"their number \(2\) is not the model's \(3\); give --class-map"):
        map_classes(["a", "b"], num_classes=3)
    with pytest.raises(UsageError, match="beyond the model's 3 classes"):
        map_classes(["0", "3"], num_classes=3)


@pytest.mark.parametrize(
    ("name", "text"),
    [("map.txt", "a 1\nmy dog,0\n"), ("map.tsv", "a\t1\nmy dog\t0\n"), ("map.json", '{"a": 1, "my dog": 0}')],
)
def test_class_maps_come_as_lines_or_json(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert read_class_map(tmp_path / name) == {"a": 1, "my dog": 0}
    (tmp_path / name).write_text("a class without its number")
    with pytest.raises(UsageError, match="is no class map"):
        read_class_map(tmp_path / name)


def test_imagenet_r_restricts_the_logits_before_the_loss(tmp_path: Path) -> None:
    from importlib import resources

    wnids = (resources.files("timm.data") / "_info" / "imagenet_r_synsets.txt").read_text().split()
    root = write_tree(tmp_path / "imagenet-r", ["."], severities=(), classes=wnids, each=1)
    dataset = open_dataset(root, num_classes=1000)
    assert dataset.restricted_to == "ImageNet-R"
    assert len(dataset.class_numbers) == 200
    assert open_dataset(root, num_classes=1000, limit=50).class_numbers == dataset.class_numbers
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY, "num_classes": 1000}).eval()
    with torch.no_grad():
        whole = model(random_images(2))
    results = evaluate(model, dataset, tmp_path / "run", methods=methods_of("source", "rem", lr=0.01))
    draw_plots(tmp_path / "run", results, model, dataset, preprocessing_of(model))
    rows = rows_of(tmp_path / "run")
    assert {row["class"] for row in rows} <= set(dataset.class_numbers)
    assert max(row["entropy"] for row in rows) <= math.log(200) + 1e-4
    assert rows[0]["label_true"] in dataset.class_numbers
    with torch.no_grad():  # the classifier is whole again
        assert torch.equal(model(random_images(2)), whole)


def test_restricting_keeps_the_chosen_logits() -> None:
    model = tiny_vit()
    images = random_images(3)
    with torch.no_grad():
        before = model(images)
        restrict_classes(model, [5, 0, 3])
        torch.testing.assert_close(model(images), before[:, [5, 0, 3]])


# --- Orders ------------------------------------------------------------------------------------------------------


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
    dataset = open_tree(
        write_tree(tmp_path / "c", ["fog", "snow"], severities=(1, 2, 3, 4, 5), each=1), severities=(1, 2, 3, 4, 5)
    )
    gradual = plan_visits(dataset, EvalOptions(scenario="gradual"), 0)
    levels = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert [visit.title for visit in gradual] == [f"{name}{level}" for name in ("snow", "fog") for level in levels]

    dataset = open_tree(tmp_path / "c")
    episodic = plan_visits(dataset, EvalOptions(scenario="episodic"), 0)
    assert [visit.reset for visit in episodic] == [True, True]
    continual = plan_visits(dataset, EvalOptions(revisit=True), 0)
    assert [(visit.title, visit.adapt, visit.phase) for visit in continual] == [
        ("snow5", True, "adapt"),
        ("fog5", True, "adapt"),
        ("snow5", False, "revisit"),
        ("fog5", False, "revisit"),
    ]
    assert continual[0].items[:, 1].tolist() != list(range(7))
    assert sorted(continual[0].items[:, 1]) == list(range(7))
    again = plan_visits(dataset, EvalOptions(revisit=True), 0)
    assert all(np.array_equal(a.items, b.items) for a, b in zip(continual, again, strict=True))
    other = plan_visits(dataset, EvalOptions(), 1)
    assert not np.array_equal(continual[0].items, other[0].items)
    stored = plan_visits(dataset, EvalOptions(order="stored"), 0)
    assert stored[0].items[:, 1].tolist() == list(range(7))

    [mixed] = plan_visits(dataset, EvalOptions(scenario="mixed"), 0)
    assert sorted(map(tuple, mixed.items.tolist())) == [(domain, place) for domain in (0, 1) for place in range(7)]
    assert int((np.diff(mixed.items[:, 0]) != 0).sum()) > 1

    unseen = plan_visits(dataset, EvalOptions(unseen=("snow",)), 0)
    assert [(visit.title, visit.adapt, visit.phase) for visit in unseen] == [
        ("fog5", True, "adapt"),
        ("snow5", False, "unseen"),
    ]
    with pytest.raises(UsageError, match=r"--unseen frost: not among the domains \(snow, fog\)"):
        plan_visits(dataset, EvalOptions(unseen=("frost",)), 0)
    with pytest.raises(
        UsageError, match=r"not there: snow 1, snow 2, snow 3, snow 4, fog 1, ... .8 in all.; choose another"
    ):
        plan_visits(dataset, EvalOptions(scenario="gradual"), 0)


# --- Metrics -----------------------------------------------------------------------------------------------------


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


# --- Runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Dataset:
    return open_tree(write_tree(tmp_path / "c", ["gaussian_noise", "fog"]))


def test_errors_are_those_counted_by_hand(tree: Dataset, tmp_path: Path) -> None:
    model = tiny_vit()
    results = evaluate(model, tree, tmp_path / "run", methods=methods_of("source"))
    preprocessing = preprocessing_of(model)
    transform = preprocessing.transform()
    for domain in tree.domains:
        images = torch.stack([transform(domain.load(place)) for place in range(21)])
        with torch.no_grad():
            guesses = model(preprocessing.normalise(images)).argmax(1).numpy()
        wrong = sum(int(guess) != label for guess, label in zip(guesses, domain.labels, strict=True))
        assert results["methods"]["source"]["error"][domain.name] == pytest.approx(100 * wrong / 21)
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == json.loads(json.dumps(results))


def test_continual_equals_adapt_on_the_same_images_in_the_same_order(tree: Dataset, tmp_path: Path) -> None:
    from remtta import RunOptions, adapt_stream

    model = tiny_vit()
    config = REMConfig(lr=0.01)
    evaluate(model, tree, tmp_path / "run", methods={"rem": config}, options=EvalOptions(batch_size=21))
    rows = rows_of(tmp_path / "run")
    adapt_stream(
        tiny_vit(),
        [row["source"] for row in rows],
        tmp_path / "adapt",
        config=config,
        options=RunOptions(batch_size=21),
    )
    assert [(row["class"], row["update"]) for row in rows] == [
        (row["class"], row["update"]) for row in rows_of(tmp_path / "adapt")
    ]
    assert [round(row["prob"], 6) for row in rows] == [row["prob"] for row in rows_of(tmp_path / "adapt")]


def test_episodic_equals_a_fresh_run_per_domain(tree: Dataset, tmp_path: Path) -> None:
    options = EvalOptions(scenario="episodic", batch_size=8)
    evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem", lr=0.05), options=options)
    fresh = []
    for domain in ("gaussian_noise", "fog"):
        single = open_tree(tmp_path / "c", domains=[domain])
        folder = tmp_path / domain
        evaluate(tiny_vit(), single, folder, methods=methods_of("rem", lr=0.05), options=EvalOptions(batch_size=8))
        fresh += [row["prob"] for row in rows_of(folder)]
    assert [row["prob"] for row in rows_of(tmp_path / "run")] == fresh


def test_several_methods_and_seeds_start_from_the_same_source(tree: Dataset, tmp_path: Path) -> None:
    model = tiny_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options = EvalOptions(batch_size=8, seeds=(0, 3), revisit=True, unseen=("fog",))
    results = evaluate(
        model,
        tree,
        tmp_path / "run",
        methods=methods_of("source", "tent", "rem", "supervised", lr=0.01),
        options=options,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    methods = results["methods"]
    assert list(methods) == ["source", "tent", "rem", "supervised"]
    rem = methods["rem"]
    assert set(rem["seeds"]) == {"0", "3"}
    assert rem["mean"] == pytest.approx(np.mean([seed["mean"] for seed in rem["seeds"].values()]))
    assert rem["mean_std"] == pytest.approx(np.std([seed["mean"] for seed in rem["seeds"].values()], ddof=1))
    assert rem["gain"] == pytest.approx(methods["source"]["mean"] - rem["mean"])
    assert list(rem["error"]) == ["gaussian_noise"]
    assert list(rem["unseen"]["error"]) == ["fog"]
    assert rem["seeds"]["0"]["unseen"]["harmonic_mean"] == pytest.approx(
        harmonic_mean(rem["seeds"]["0"]["mean"], rem["seeds"]["0"]["unseen"]["mean"])
    )
    assert list(rem["revisit"]["error"]) == ["gaussian_noise"]
    assert (rem["forwards_per_image"], rem["trainable_parameters"]) == (3, 3 * 4 * 48)
    assert 0 < rem["tvd"] < 1
    assert len(rem["seeds"]["0"]["entropies"]) == 3
    assert rem["timing"]["images_per_s"] > 0
    assert "tvd" not in methods["tent"]
    learned = [row for row in rows_of(tmp_path / "run") if row["method"] == "rem" and row["seed"] == 3]
    assert [row["adapted"] for row in learned] == [True] * 21 + [False] * 42
    assert (tmp_path / "run" / "deltas" / "rem_seed3.safetensors").is_file()
    table = markdown_table(results)
    assert table == (tmp_path / "run" / "table.md").read_text()
    assert table.startswith(
        "| error in % | gaussian_noise | mean | gain | ECE % | unseen | revisit | images/s |\n| --- |"
    )
    efficiency = table.partition("\n\n")[2].splitlines()
    assert efficiency[0] == (
        "| efficiency | parameters | forward passes | backward passes | models held | s per 1,000 images |"
    )
    assert [line.split(" | ")[:5] for line in efficiency[2:]] == [
        ["| source", "0", "1", "0", "1"],
        ["| tent", "864", "1", "1", "1"],
        ["| rem", "576", "3", "3", "1"],
        ["| supervised", "576", "1", "1", "1"],
    ]
    assert " ± " in plain_table(results)


def test_gradual_counts_all_severities_of_a_corruption(tmp_path: Path) -> None:
    levels = (1, 2, 3, 4, 5)
    dataset = open_tree(write_tree(tmp_path / "c", ["fog"], severities=levels, each=1), severities=levels)
    results = evaluate(
        tiny_vit(), dataset, tmp_path / "run", methods=methods_of("source"), options=EvalOptions(scenario="gradual")
    )
    seed = results["methods"]["source"]["seeds"]["0"]
    assert seed["domains"]["fog"]["images"] == 9 * 7
    assert list(seed["error_by_severity"]) == [f"fog{level}" for level in levels]
    # Severity 5 is visited once, the others twice.
    weights = [2, 2, 2, 2, 1]
    expected = sum(w * error for w, error in zip(weights, seed["error_by_severity"].values(), strict=True)) / 9
    assert seed["error"]["fog"] == pytest.approx(expected)


def test_in_limited_time_only_every_so_manyth_batch_is_learned_from(tree: Dataset, tmp_path: Path) -> None:
    options = EvalOptions(scenario="time-constrained", cost_ratio=2.5, batch_size=3)
    evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=options)
    adapted = [row["adapted"] for row in rows_of(tmp_path / "run")][::3]
    assert adapted == [place % 3 == 0 for place in range(14)]


def test_a_measured_cost_ratio_leaves_the_method_as_it_was(tree: Dataset, tmp_path: Path) -> None:
    options = EvalOptions(scenario="time-constrained", batch_size=7)
    results = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=options)
    run = results["methods"]["rem"]["seeds"]["0"]
    assert run["cost_ratio"] > 1
    assert run["updates"] == rows_of(tmp_path / "run")[-1]["update"] + rows_of(tmp_path / "run")[-1]["adapted"]
    assert rows_of(tmp_path / "run")[0]["update"] == 0


class _Die(BaseException):
    """Stands for kill -9: nothing is cleaned up in the evaluation's name."""


@pytest.mark.parametrize(
    ("scenario", "killed_at"), [("continual", 1), ("continual", 7), ("mixed", 4), ("time-constrained", 7)]
)
def test_after_a_kill_resuming_gives_the_same_results(
    scenario: str, killed_at: int, tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        options = EvalOptions(
            scenario=scenario,
            batch_size=5,
            seeds=(0, 1),
            save_every_s=0.0,
            cost_ratio=2.0 if scenario == "time-constrained" else None,
            revisit=True,
            **changes,
        )
        return evaluate(tiny_vit(), tree, folder, methods=methods_of("source", "rem", lr=0.02), options=options)

    whole = run(tmp_path / "whole")
    calls = 0

    def dying(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == killed_at:
            with open(tmp_path / "killed" / "predictions.jsonl", "ab") as file:
                file.write(b'{"torn')
            raise _Die
        return rem_loss(*args)

    monkeypatch.setattr(rem_module, "rem_loss", dying)
    with pytest.raises(_Die):
        run(tmp_path / "killed")
    monkeypatch.undo()
    resumed = run(tmp_path / "killed", resume=True)
    assert rows_of(tmp_path / "killed") == rows_of(tmp_path / "whole")
    assert without_timing(resumed) == without_timing(whole)
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(tmp_path / "whole"))


def without_timing(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: without_timing(value) for key, value in content.items() if key != "timing"}
    return content


def test_a_signal_saves_the_progress(tree: Dataset, tmp_path: Path) -> None:
    class Soon(Interrupts):
        calls = 0

        def check(self) -> None:
            self.calls += 1
            if self.calls == 4:
                raise Stopped(15)

    options = EvalOptions(batch_size=4)
    with pytest.raises(Stopped):
        evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=options, interrupts=Soon())
    assert (tmp_path / "run" / ".progress.safetensors").is_file()
    evaluate(
        tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=EvalOptions(batch_size=4, resume=True)
    )
    whole = evaluate(tiny_vit(), tree, tmp_path / "whole", methods=methods_of("rem"), options=options)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")
    assert whole["status"] == "completed"


def test_resuming_needs_the_same_settings_and_something_to_resume(tree: Dataset, tmp_path: Path) -> None:
    results = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"))
    with pytest.raises(UsageError, match="holds an earlier evaluation; go on with it by --resume"):
        evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"))
    resume = EvalOptions(resume=True)
    again = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("source"), options=resume)
    assert again == json.loads(json.dumps(results))
    record = json.loads((tmp_path / "run" / "results.json").read_text())
    (tmp_path / "run" / "results.json").write_text(json.dumps({**record, "status": "running"}))
    with pytest.raises(UsageError, match=r"--resume needs the settings the run began with: methods"):
        evaluate(
            tiny_vit(),
            tree,
            tmp_path / "run",
            methods=methods_of("tent"),
            options=EvalOptions(resume=True, batch_size=3),
        )
    begun = evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)
    assert begun["methods"]["source"]["mean"] == results["methods"]["source"]["mean"]
    (tmp_path / "new" / "results.json").unlink()
    with pytest.raises(UsageError, match=r"has lost its results\.json"):
        evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)
    (tmp_path / "new" / "results.json").write_text("[]")
    with pytest.raises(RemttaError, match=r"results\.json is damaged"):
        evaluate(tiny_vit(), tree, tmp_path / "new", methods=methods_of("source"), options=resume)


def test_an_unreadable_image_stops_the_evaluation_unless_it_may_be_left_out(tree: Dataset, tmp_path: Path) -> None:
    Path(tree.domains[0].sources[4]).write_bytes(b"no image")
    with pytest.raises(StreamError, match=r"not an image that Pillow can read \(--resume --on-error skip"):
        evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"))
    results = evaluate(
        tiny_vit(),
        tree,
        tmp_path / "skip",
        methods=methods_of("rem"),
        options=EvalOptions(on_error="skip", batch_size=5),
    )
    assert results["methods"]["rem"]["seeds"]["0"]["domains"]["gaussian_noise"]["images"] == 20
    assert sum("error" in row for row in rows_of(tmp_path / "skip")) == 1
    seed = results["methods"]["rem"]["seeds"]["0"]
    assert (seed["images"], seed["skipped"]) == (41, 1)
    again = EvalOptions(on_error="skip", resume=True)
    resumed = evaluate(tiny_vit(), tree, tmp_path / "run", methods=methods_of("rem"), options=again)
    assert resumed["status"] == "completed"


def test_images_of_the_input_size_are_taken_as_they_are(tmp_path: Path) -> None:
    model = tiny_vit()
    own = preprocessing_of(model)
    assert own.crop_pct == 0.9
    same = open_tree(write_tree(tmp_path / "same"))
    assert choose_preprocessing(model, same).crop_pct == 1.0
    assert choose_preprocessing(model, same, resize="always") == own
    other = open_tree(write_tree(tmp_path / "other", size=40))
    assert choose_preprocessing(model, other) == own
    with pytest.raises(UsageError, match="0 of 63 images have the model's input size of 32x32"):
        choose_preprocessing(model, other, resize="never")
    draw_image(0, 32, 32).save(tmp_path / "other" / "fog" / "5" / "class_a" / "0.png")
    with pytest.raises(UsageError, match=r"1 of 63 images .* \(sizes: 40x40, 32x32\); choose --resize always"):
        choose_preprocessing(model, open_tree(tmp_path / "other"))


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


# --- The command -------------------------------------------------------------------------------------------------


def test_the_command_prints_the_fields_lines_and_a_table(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "c", ["fog"])
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--no-plots"]
    options += ["--set", "tent.lr=0.002", "--output", tmp_path / "run", "-b", "4"]
    methods = ("--methods", "source,tent,rem", "--seeds", "0,1", "--lr", "0.01")
    code = remtta_here("eval", root, "--continual", *methods, *options)
    captured = capfd.readouterr()
    assert code == 0, captured.err
    assert captured.err.count("error % [fog5]: ") == 6
    assert captured.out.splitlines()[0].split() == ["error", "in", "%", "source", "tent", "rem"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["settings"]["methods"]["tent"]["lr"] == 0.002
    assert results["settings"]["methods"]["rem"]["lr"] == 0.01
    assert results["settings"]["model"]["checkpoint"] == str(checkpoint)
    assert len(results["settings"]["model"]["base_sha256"]) == 64


def test_the_table_is_printed_before_any_picture_can_fail(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> None:
        raise OutputError("plots/masks.png cannot be written: No space left on device")

    monkeypatch.setattr(plots, "draw_plots", failing)
    root = write_tree(tmp_path / "c", ["fog"], each=1)
    options: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--output", tmp_path / "run"]
    assert remtta_here("eval", root, "--methods", "source", *options) == 1
    captured = capfd.readouterr()
    assert captured.out.splitlines()[0].split() == ["error", "in", "%", "source"]
    assert captured.err.splitlines()[-1] == "Error: plots/masks.png cannot be written: No space left on device"


def test_no_batch_size_is_no_default(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert remtta_here("eval", tmp_path, "--batch-size", "0") == 2
    assert "--batch-size" in capfd.readouterr().err


def _errors() -> Iterator[tuple[list[str], int, str]]:
    yield ["nowhere"], 2, "nowhere: no such folder"
    yield ["c", "--methods", "tenth"], 2, 'unknown method "tenth"'
    yield ["c", "--methods", "source,tent", "--margin", "0.1"], 2, "none of source, tent has a setting for --margin"
    yield ["c", "--set", "rem.speed=1"], 2, "a setting of rem must be one of"
    yield ["c", "--set", "tent.lr=1"], 2, "with a method of --methods (source, rem)"
    yield ["c", "--scenario", "sudden"], 2, "scenario must be one of continual"
    yield ["c", "--continual", "--episodic"], 2, "choose one scenario"
    yield ["c", "--seeds", "a"], 2, "--seeds takes whole numbers"
    yield ["c", "--severity", "6"], 2, "--severity takes numbers from 1 to 5"
    yield ["c", "--severity", "4"], 2, "has no severity 4; it has 5"
    yield ["c", "--domains", "snow"], 2, "no domain snow; it has fog"
    yield ["c", "--protocol", "mine"], 2, 'unknown protocol "mine"'
    yield ["c", "--protocol", "rem-paper"], 2, "jpeg_compression; it has fog; name the ones to evaluate with --domains"
    yield ["c", "--resize", "some"], 2, "--resize takes auto"
    yield ["c", "--resume"], 2, "--resume needs the --output"
    yield ["c", "--scenario", "gradual", "--severity", "5"], 2, "visits all severities; leave --severity out"
    yield ["c", "--crop-pct", "0"], 2, "crop-pct must be in (0, 1], got 0"
    yield ["c", "--imbalance", "10"], 2, "imbalance must be left out but in label-shift"
    yield ["c", "--cost-ratio", "2"], 2, "cost ratio must be left out but in time-constrained"
    yield ["c", "--scenario", "gradual"], 2, "has no severity 1; it has 5"
    yield (
        ["plain", "--scenario", "gradual"],
        2,
        "these are not there: fog 1, fog 2, fog 3, fog 4, fog 5; choose another",
    )
    yield ["c", "--image-list", "nowhere.txt"], 2, "--image-list: nowhere.txt cannot be read"
    yield ["c", "--class-map", "nowhere.txt"], 2, "nowhere.txt is no class map"
    yield ["empty"], 1, "no images in this folder or below it"


@pytest.mark.parametrize(
    ("args", "code", "text"), list(_errors()), ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_bad_input_gets_one_clear_line(
    args: list[str],
    code: int,
    text: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "c", ["fog"], each=1)
    write_tree(tmp_path / "plain", ["fog"], severities=(), each=1)
    (tmp_path / "empty").mkdir()
    exit_code = remtta_here("eval", *TINY_OPTIONS, "--checkpoint", str(checkpoint), *args)
    captured = capfd.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("Error: ")]
    assert (exit_code, len(errors)) == (code, 1), captured.err
    assert text in errors[0]
    assert captured.out == ""
    assert not (tmp_path / "runs").exists()


def test_the_command_starts_from_a_delta_on_the_model_it_was_made_on(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = write_tree(tmp_path / "c", ["fog"], each=1)
    options: list[str | Path] = ["--methods", "rem", "--no-plots", "-b", "4"]
    first: list[str | Path] = [*TINY_OPTIONS, "--checkpoint", checkpoint, "--output", tmp_path / "a"]
    assert remtta_here("eval", root, *options, *first) == 0
    delta = tmp_path / "a" / "deltas" / "rem_seed0.safetensors"
    more: list[str | Path] = ["--delta", delta, "--reset-every", "4", "--output", tmp_path / "b"]
    assert remtta_here("eval", root, *options, *more) == 0, capfd.readouterr().err
    settings = json.loads((tmp_path / "b" / "results.json").read_text())["settings"]
    assert (settings["start_delta"]["updates"], settings["options"]["reset_every"]) == (2, 4)
    assert [row["update"] for row in rows_of(tmp_path / "b")] == [2] * 4 + [0] * 3
