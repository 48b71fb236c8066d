"""Models of every kind of classifier on variants of ImageNet, some of which restrict the classes."""

import math
import os
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from remtta import apply_delta, load_delta
from remtta.lab.evaluation.datasets import open_dataset
from remtta.lab.evaluation.domains import Dataset
from remtta.models.preprocessing import preprocessing_of
from tests.conftest import TINY, copied, draw_image
from tests.lab.evaluation.trees import evaluate_tiny, methods_of
from tests.records import rows_of

IMAGES = 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("vit_tiny_patch16_224", TINY),
    "classifier behind a layer of its own": ("mobilenetv3_small_050", {}),
}


@copied
def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    name, options = MODELS[kind]
    overlay = {"input_size": (3, 32, 32)}
    model: nn.Module = timm.create_model(name, num_classes=1000, pretrained_cfg_overlay=overlay, **options)
    return model.eval()


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet-R, which is known by its 200 classes, and some of -V2's, whose folders are numbers."""
    root = tmp_path_factory.mktemp("variants")
    draw_image(0, 32, 32).save(root / "image.png")
    wnids = (resources.files("timm.data") / "_info" / "imagenet_r_synsets.txt").read_text().split()
    _link(root / "image.png", root / "r", wnids)
    _link(root / "image.png", root / "v2", ["0", "17", "999", *map(str, range(400, 405))])
    return root


def _link(image: Path, folder: Path, classes: list[str]) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True)
        os.link(image, folder / name / "0.png")


def few_of(root: Path) -> Dataset:
    """Eight images, each of another class and unlike the others."""
    dataset = open_dataset(root, num_classes=1000, limit=IMAGES)
    for number, source in enumerate(dataset.domains[0].sources):
        os.unlink(source)
        draw_image(number, 32, 32).save(source)
    return dataset


@pytest.mark.parametrize(
    ("variant", "restricted", "kind"), [*(("r", "ImageNet-R", kind) for kind in MODELS), ("v2", None, "head")]
)
def test_answers_are_those_of_the_whole_model_among_the_classes(
    variant: str, restricted: str | None, kind: str, variants: Path, tmp_path: Path
) -> None:
    model, dataset = make(kind), few_of(variants / variant)
    assert dataset.restricted_to == restricted and len(dataset.class_numbers) == (200 if restricted else IMAGES)
    numbers = torch.tensor(dataset.class_numbers if restricted else range(1000))
    (domain,), preprocessing = dataset.domains, preprocessing_of(model)
    pixels = torch.stack([preprocessing.transform()(domain.load(position)) for position in range(IMAGES)])
    with torch.no_grad():
        before = model(preprocessing.normalise(pixels))
    probs, positions = before[:, numbers].softmax(-1).max(-1)

    methods = methods_of("source", "tent")
    results = evaluate_tiny(dataset, tmp_path / "run", methods, model=model, batch_size=4, order="stored")
    source, tent = ([row for row in rows_of(tmp_path / "run") if row["method"] == name] for name in ("source", "tent"))
    assert [row["class"] for row in source] == numbers[positions].tolist()
    assert [row["prob"] for row in source] == pytest.approx(probs.tolist(), abs=1e-5)
    assert [row["label_true"] for row in source] == domain.labels.tolist()
    wrong = sum(guess != label for guess, label in zip(numbers[positions].tolist(), domain.labels, strict=True))
    assert list(results["methods"]["source"]["error"].values()) == [100 * wrong / IMAGES]
    assert {row["class"] for row in tent} <= set(numbers.tolist()) and tent[-1]["update"] == 1
    assert max(row["entropy"] for row in (*source, *tent)) <= math.log(len(numbers)) + 1e-4
    with torch.no_grad():  # the classifier is whole again
        assert torch.equal(model(preprocessing.normalise(pixels)), before)


def test_class_maps_and_lists_are_restricted_too_but_not_domains_with_others(
    variants: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = open_dataset(variants / "r", num_classes=1000)
    class_map = {Path(source).parent.name: 999 - number for number, source in enumerate(dataset.domains[0].sources)}
    mapped = open_dataset(variants / "r", num_classes=1000, class_map=class_map)
    assert mapped.restricted_to == "ImageNet-R" and mapped.class_numbers == list(range(800, 1000))
    assert open_dataset(variants / "r", num_classes=200).restricted_to is None  # a head of just these classes
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{name}/0.png {name}\n" for name in class_map))
    few = open_dataset(variants / "r", num_classes=1000, labels_file=listed, limit=IMAGES)
    assert few.restricted_to == "ImageNet-R" and few.class_numbers == dataset.class_numbers
    (tmp_path / "r").symlink_to(variants / "r")
    _link(variants / "image.png", tmp_path / "sketch", ["n01440764"])
    assert not caplog.messages and open_dataset(tmp_path, num_classes=1000).restricted_to is None
    assert caplog.messages[0].startswith("ImageNet-R or -A is restricted to its 200 classes only without other domains")


def test_deltas_of_restricted_and_whole_heads_fit_each_other(variants: Path, tmp_path: Path) -> None:
    model, dataset = make("head"), few_of(variants / "r")
    run = partial(evaluate_tiny, dataset, model=model, batch_size=4, order="stored")
    run(folder=tmp_path / "run", methods=methods_of("center"))
    saved = load_delta(tmp_path / "run" / "deltas" / "center_seed0.safetensors")
    (bias,) = saved.tensors.values()
    moved = set(bias.nonzero().flatten().tolist())
    assert bias.shape == (1000,) and moved and moved <= set(dataset.class_numbers)
    results = run(folder=tmp_path / "more", delta=saved)
    apply_delta(model, saved)
    again = run(folder=tmp_path / "applied")
    assert results["methods"]["source"]["error"] == again["methods"]["source"]["error"]
    first, second = (rows_of(tmp_path / name) for name in ("more", "applied"))
    assert [row["prob"] for row in first] == pytest.approx([row["prob"] for row in second], abs=1e-5)
