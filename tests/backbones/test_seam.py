"""A new architecture that is not a ViT, added by one backbone class and one line, works with the methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta import REMConfig, RunOptions, adapt_stream
from remtta.backbones import families
from remtta.backbones.backbone import Backbone, Scores
from remtta.backbones.families import backbone_of
from remtta.backbones.tokens import Transformer
from remtta.backbones.vit import ViT
from remtta.errors import ModelError
from remtta.methods.method import Method, build_method
from remtta.methods.settings import method_config
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.test_registry import PASSABLE, QUICK

WIDTH, PATCH, GRID, DEPTH = 24, 4, 8, 4
LABELS = torch.tensor([0, 3, 6, 2, 2])


class ToyBlock(nn.Module):
    """A toy block: mix neighbouring positions, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.around = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        near = self.around(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        out: Tensor = x + self.mix(self.norm(near))
        return out


class ToyNet(nn.Module):
    """A small convolutional net on maps (B, rows, columns, D): no tokens, no attention, no class token."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.num_classes = NUM_CLASSES
        self.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
        self.stem = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        with torch.no_grad():
            self.head.weight.normal_(std=1.5)

    def map_of(self, images: Tensor) -> Tensor:
        x: Tensor = self.stem(images).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return x

    def features_of(self, x: Tensor) -> Tensor:
        features: Tensor = self.norm(x).mean((1, 2))
        return features

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features_of(self.map_of(images)))
        return logits


class ToyBackbone(Backbone):
    """Views start from the images; a masked view sets the pixels of the other patches to zero."""

    num_patches, patch_size = GRID * GRID, (PATCH, PATCH)
    num_tokens, num_passing = num_patches, 4 * num_patches * WIDTH
    input_size = (PATCH * GRID, PATCH * GRID)

    def __init__(self, module: ToyNet) -> None:
        self.module: Any = module

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return list(self.module.blocks)

    def embed(self, images: Tensor) -> Tensor:
        return images

    def count_patches(self, embedded: Tensor) -> int:
        return self.num_patches

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        if kept is not None:
            stays = torch.zeros(len(kept), self.num_patches).scatter_(1, kept, 1.0).view(-1, 1, GRID, GRID)
            embedded = embedded * stays.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)
        logits: Tensor = self.module(embedded)
        return logits

    def check_scores(self, kind: Scores) -> None:
        if kind == "attention":
            raise ModelError("ToyNet has no attention to mask by; choose --set masking=features")

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        x = self.module.map_of(embedded)
        return self.module.head(self.module.features_of(x)), x.detach().norm(dim=-1).flatten(1)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.features_of(self.module.map_of(images))
        return self.module.head(features), features


@pytest.fixture(autouse=True)
def _the_toy_is_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, ToyNet, ToyBackbone)


def make(name: str, net: ToyNet | None = None, **settings: Any) -> Method:
    own = {"masking": "features"} if name.startswith("rem") else {**PASSABLE.get(name, {}), **QUICK.get(name, {})}
    config = method_config(name, {"lr": 0.01, **own, **settings}, batch_size=5)
    method = build_method(name, net or ToyNet(), config)
    if method.objective.needs_source:
        method.use_source(method.source_statistics([random_images(4, 90), random_images(4, 91)]))
    return method


def run(method: Method, seed: int) -> Tensor:
    return method(random_images(5, seed), LABELS if method.objective.needs_labels else None)


def norm_names(*blocks: int) -> set[str]:
    return {f"blocks.{number}.norm.{part}" for number in blocks for part in ("weight", "bias")}


FIRST_BLOCKS = norm_names(0, 1, 2)
ALL_NORMS = norm_names(*range(DEPTH)) | {"norm.weight", "norm.bias"}
EVERYTHING = {name for name, _ in ToyNet().named_parameters()}
ADAPTED = {"tent": ALL_NORMS, "sar": FIRST_BLOCKS, "roid": ALL_NORMS, "cotta": EVERYTHING, "rem": FIRST_BLOCKS}


@pytest.mark.parametrize(("name", "adapted"), ADAPTED.items())
def test_only_the_chosen_weights_change_and_the_answer_is_from_before(name: str, adapted: set[str]) -> None:
    net, source = ToyNet(), ToyNet().state_dict()
    method = make(name, net)
    images = random_images(5, 0)
    expected = method.predict(images)
    if name != "roid":  # which corrects for the batch's classes
        with torch.no_grad():
            torch.testing.assert_close(expected, ToyNet()(images))
    assert torch.equal(method(images), expected)
    for seed in range(1, 3):
        run(method, seed)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, source[name])}
    assert changed == set(method.adapted_names) == adapted
    assert all(torch.equal(source[name] + change, net.state_dict()[name]) for name, change in method.delta().items())


def test_a_vit_has_tokens_and_the_toy_has_none() -> None:
    assert isinstance(backbone_of(tiny_vit()), ViT) and isinstance(backbone_of(tiny_vit()), Transformer)
    assert isinstance(backbone_of(ToyNet()), Backbone) and not isinstance(backbone_of(ToyNet()), Transformer)


def test_a_whole_run_adapts_it(frames: Path, tmp_path: Path) -> None:
    config = REMConfig(masking="features")
    summary = adapt_stream(ToyNet(), frames, tmp_path / "run", config=config, options=RunOptions(batch_size=4))
    assert (summary.num_frames, summary.num_updates) == (12, 3)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(record["adapted"]) == FIRST_BLOCKS
