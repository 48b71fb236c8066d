"""Evaluations on hand-made trees whose answers can be counted."""

import re
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remtta.errors import ModelError, StreamError, UsageError
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.tables import markdown_table, plain_table
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import method_config
from remtta.models.info import set_labels
from remtta.options import GuardOptions
from remtta.pipeline.pipeline import Pipeline
from remtta.pipeline.prediction import Prediction
from tests.conftest import tiny_vit
from tests.lab.evaluation.trees import evaluate_tiny, methods_of, open_tree, write_tree
from tests.records import json_of, rows_of


@pytest.mark.parametrize("name", ["rem", "rem+guard", "rem+smooth"])
def test_episodic_equals_a_fresh_run_per_domain(name: str, tree: Dataset, tmp_path: Path) -> None:
    methods = {name: REMConfig(lr=0.05)}
    options: dict[str, Any] = {"batch_size": 4, "guard": GuardOptions(most_drift=0.01, retries=1)}
    results = evaluate_tiny(tree, tmp_path / "run", methods, scenario="episodic", **options)
    guard = results["methods"][name]["seeds"]["0"]["guard"]
    alarms = 4 if name == "rem+guard" else None
    assert (guard or {}).get("alarms") == alarms  # the second alarm of each domain ends adaptation there
    fresh = []
    for domain in ("gaussian_noise", "fog"):
        evaluate_tiny(open_tree(tmp_path / "c", domains=[domain]), tmp_path / domain, methods, **options)
        fresh += [row["prob"] for row in rows_of(tmp_path / domain)]
    assert [row["prob"] for row in rows_of(tmp_path / "run")] == fresh


def test_several_methods_and_seeds_start_from_the_same_source(tree: Dataset, tmp_path: Path) -> None:
    model = tiny_vit()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tried = methods_of("source", "tent", "rem", "supervised", lr=0.01)
    options: dict[str, Any] = {"batch_size": 21, "seeds": (0, 3), "revisit": True, "unseen": ("fog",)}
    results = evaluate_tiny(tree, tmp_path / "run", tried, model=model, **options)
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
    first = rem["seeds"]["0"]
    assert first["unseen"]["harmonic_mean"] == pytest.approx(harmonic_mean([first["mean"], first["unseen"]["mean"]]))
    assert list(rem["revisit"]["error"]) == ["gaussian_noise"]
    assert rem["forwards_per_image"] == pytest.approx(1 + 2 / 3)  # of two domains it only predicts
    assert rem["trainable_parameters"] == 4 * 48
    assert 0 < rem["tvd"] < 1 and len(first["entropies"]) == 3
    assert rem["timing"]["images_per_s"] > 0
    assert "tvd" not in methods["tent"]
    learned = [row for row in rows_of(tmp_path / "run") if row["method"] == "rem" and row["seed"] == 3]
    assert [row["adapted"] for row in learned] == [True] * 21 + [False] * 42
    assert (tmp_path / "run" / "deltas" / "rem_seed3.safetensors").is_file()
    table = markdown_table(results)
    assert table == (tmp_path / "run" / "table.md").read_text()
    columns = "gaussian_noise | mean | SE | gain | top-5 error | ECE % | first 50 | unseen | revisit | images/s"
    assert table.startswith(f"| error in % | {columns} |\n")
    efficiency = table.split("\n\n")[-1].splitlines()
    assert efficiency[0] == (
        "| efficiency | parameters | forward passes | backward passes | models held | s per 1,000 images |"
    )
    assert [line.split(" | ")[:5] for line in efficiency[2:]] == [
        ["| source", "0", "1", "0", "1"],
        ["| tent", "480", "1", "0.333", "1"],
        ["| rem", "192", "1.67", "1", "1"],
        ["| supervised", "192", "1", "0.333", "1"],
    ]
    assert " ± " in plain_table(results)


def test_rows_have_batches_of_their_own_size_on_the_same_images(
    tree: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With an order that the seed draws images for, the source model runs with every seed, on the same ones."""
    caplog.set_level("INFO")
    names = ["source", "remtta", "remtta+batch7"]
    results = evaluate_tiny(tree, tmp_path / "run", names, order="one-class", seeds=(0, 1), batch_size=25)["methods"]
    assert re.search(
        r"one-class order \(class_\w; in the first domain \d images?, again and again\), seed 0", caplog.text
    )
    updates = {name: [seed["updates"] for seed in results[name]["seeds"].values()] for name in names}
    assert updates == {"source": [0, 0], "remtta": [4, 4], "remtta+batch7": [16, 16]}  # 50 images of two domains
    rows = rows_of(tmp_path / "run")
    shown: dict[tuple[str, int], list[str]] = {(name, seed): [] for name in names for seed in (0, 1)}
    for row in rows:
        shown[row["method"], row["seed"]].append(row["source"])
    assert shown["source", 0] == shown["remtta", 0] == shown["remtta+batch7", 0] != shown["remtta", 1]
    assert shown["source", 1] == shown["remtta", 1]


def test_gradual_counts_all_severities_of_a_corruption(tmp_path: Path) -> None:
    levels = (1, 2, 3, 4, 5)
    dataset = open_tree(write_tree(tmp_path / "c", ["fog"], severities=levels, each=1), severities=levels)
    results = evaluate_tiny(dataset, tmp_path / "run", scenario="gradual")
    seed = results["methods"]["source"]["seeds"]["0"]
    assert seed["domains"]["fog"]["images"] == 9 * 7
    assert list(seed["error_by_severity"]) == [f"fog{level}" for level in levels]
    # Severity 5 is visited once, the others twice.
    weights = [2, 2, 2, 2, 1]
    expected = sum(w * error for w, error in zip(weights, seed["error_by_severity"].values(), strict=True)) / 9
    assert seed["error"]["fog"] == pytest.approx(expected)


def test_in_limited_time_only_every_so_manyth_batch_is_learned_from(tree: Dataset, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scenario": "time-constrained", "cost_ratio": 2.5, "batch_size": 3}
    evaluate_tiny(tree, tmp_path / "run", methods_of("rem"), **options)
    adapted = [row["adapted"] for row in rows_of(tmp_path / "run")][::3]
    assert adapted == [number % 3 == 0 for number in range(14)]
    light = {"rem": method_config("rem", {"adapt_every": 2}, batch_size=3)}
    results = evaluate_tiny(tree, tmp_path / "light", light, **options)
    passes = [results["methods"]["rem"][f"{way}_per_image"] for way in ("forwards", "backwards")]
    assert passes == pytest.approx([1 + 2 * 4 / 14, 3 * 4 / 14])
    adapted = [row["adapted"] for row in rows_of(tmp_path / "light")][::3]
    assert adapted == [number % 4 == 0 for number in range(14)]  # the batch between updates takes no time


def test_a_measured_cost_ratio_counts_the_source_models_pass_and_leaves_the_method_as_it_was(
    tree: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    predict = Pipeline.predict

    def counted(pipeline: Pipeline, images: Tensor, *args: Any, **kwargs: Any) -> Prediction:
        sizes.append(len(images))
        return predict(pipeline, images, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "predict", counted)
    timed: dict[str, Any] = {"scenario": "time-constrained", "batch_size": 7}
    results = evaluate_tiny(tree, tmp_path / "run", ["rem+guard"], **timed)
    ratio = results["methods"]["rem+guard"]["seeds"]["0"]["cost_ratio"]
    assert ratio > 1 and sum(sizes) == 42 + 3 * 7  # three more updates, with all that belongs to them
    evaluate_tiny(tree, tmp_path / "again", ["rem+guard"], **timed, cost_ratio=ratio)
    assert rows_of(tmp_path / "run") == rows_of(tmp_path / "again")


def test_a_method_that_learned_nothing_is_named(
    tree: Dataset, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate_tiny(tree, tmp_path / "run", {"eta": {"entropy_margin": 1e-9}, "tent": None})
    assert [line for line in caplog.messages if "update" in line] == ["eta, seed 0, made no update"]


def test_a_method_that_does_not_suit_the_model_is_refused_before_the_first_run(tree: Dataset, tmp_path: Path) -> None:
    for name, why in (("norm", "batch norm"), ("watt", "zero-shot")):
        with pytest.raises(ModelError, match=f"^{name}: .*{why}"):
            evaluate_tiny(tree, tmp_path / "run", ["source", name])
        assert not (tmp_path / "run").exists()


def test_an_unreadable_image_stops_the_evaluation_unless_it_may_be_left_out(tree: Dataset, tmp_path: Path) -> None:
    Path(tree.domains[0].sources[4]).write_bytes(b"no image")
    with pytest.raises(StreamError, match=r"not an image that Pillow can read \(--resume --on-error skip"):
        evaluate_tiny(tree, tmp_path / "run", methods_of("rem"))
    assert json_of(tmp_path / "run" / "results.json")["status"].startswith("error: rem, seed 0: ")
    results = evaluate_tiny(tree, tmp_path / "skip", methods_of("rem"), on_error="skip", batch_size=5)
    assert sum("error" in row for row in rows_of(tmp_path / "skip")) == 1
    seed = results["methods"]["rem"]["seeds"]["0"]
    assert (seed["images"], seed["skipped"], seed["domains"]["gaussian_noise"]["images"]) == (41, 1, 20)
    resumed = evaluate_tiny(tree, tmp_path / "run", methods_of("rem"), on_error="skip", resume=True)
    assert resumed["status"] == "completed"


def test_errors_of_recurring_domains_are_reported_by_round_too(tree: Dataset, tmp_path: Path) -> None:
    results = evaluate_tiny(tree, tmp_path / "run", scenario="recurring", visits=2, unseen=("fog",))
    source = results["methods"]["source"]
    assert [row["phase"] for row in rows_of(tmp_path / "run")] == ["adapt"] * 42 + ["unseen"] * 21
    assert source["error_by_round"] == [pytest.approx(source["mean"])] * 2


def test_folders_are_matched_by_the_names_of_a_models_classes(tree: Dataset, tmp_path: Path) -> None:
    """In the order of folders, a model with other numbers for the same names would be wrong nearly always."""
    model, folders = tiny_vit(), [f"class_{letter}" for letter in "abcdefg"]
    set_labels(model, folders[::-1])
    with pytest.raises(UsageError, match="pass these to open_dataset as labels="):
        evaluate_tiny(tree, tmp_path / "run", model=model)
    named = open_tree(tree.root, labels=folders[::-1])
    results = evaluate_tiny(named, tmp_path / "run", model=model)
    set_labels(model, list("hijklmn"))  # names of other things
    evaluate_tiny(tree, tmp_path / "other", model=model)
    rows, others = rows_of(tmp_path / "run"), rows_of(tmp_path / "other")
    assert [row["label_true"] for row in rows] == [6 - row["label_true"] for row in others]
    assert results["methods"]["source"]["mean"] == pytest.approx(
        100 * np.mean([row["class"] != 6 - row["label_true"] for row in others])
    )


def test_numeric_folders_may_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    model, names = tiny_vit(), ["0", "1", "10", "2", "3", "4", "5"]
    set_labels(model, list("hijklmn"))
    evaluate_tiny(
        open_tree(write_tree(tmp_path / "c", ["fog"], (), names), class_order="name"), tmp_path / "run", model=model
    )
    true = {Path(row["source"]).parent.name: row["label_true"] for row in rows_of(tmp_path / "run")}
    assert [true[name] for name in names] == list(range(7))


def test_a_classifier_that_is_not_timms_gets_the_folders_names(tree: Dataset, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LayerNorm([8, 8, 8]), nn.Flatten(), nn.Linear(512, 7))
    evaluate_tiny(tree, tmp_path / "run", model=model)
    assert {row["label"] for row in rows_of(tmp_path / "run")} <= {f"class_{letter}" for letter in "abcdefg"}
    assert not hasattr(model, "pretrained_cfg")
