"""From class folders to the model's class numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import timm
import torch

from remtta.errors import UsageError
from remtta.evaluation import evaluate
from remtta.evaluation.classes import map_classes, read_class_map
from remtta.evaluation.datasets import open_dataset
from remtta.evaluation.plots import draw_plots
from remtta.models.heads import restrict_classes
from remtta.models.preprocessing import preprocessing_of
from tests.conftest import TINY, random_images, tiny_vit
from tests.evaluation.trees import methods_of, write_tree
from tests.records import rows_of


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
