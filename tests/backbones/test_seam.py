"""The methods on an architecture that is no ViT, made known to them by one backbone and one line."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta import REM, REMConfig, RunOptions, adapt_stream
from remtta.backbones import registry
from remtta.backbones.base import Backbone, Scores, TokenBackbone
from remtta.backbones.norms import adapted_norms
from remtta.backbones.registry import backbone_of
from remtta.backbones.vit import ViT
from remtta.bench.fitting import fitting_micro_batch
from remtta.bench.products import BareProduct
from remtta.errors import ModelError
from remtta.guard.guard import Guard
from remtta.methods.method import Method
from remtta.methods.registry import METHODS, build_method
from remtta.methods.settings import ZERO_SHOT, method_config
from remtta.options import GuardOptions
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.test_registry import PASSABLE, QUICK

WIDTH, PATCH, GRID, DEPTH = 24, 4, 8, 4
IN_BETWEEN = ("foa", "vida", "continual-mae", "becotta")  # reach in between a transformer's blocks
LABELS = torch.tensor([0, 3, 6, 2, 2])


class ToyBlock(nn.Module):
    """Look around, then mix channels."""

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
    """A little convolutional net on maps (B, rows, columns, D): no tokens, no attention, no class token."""

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
    """Views start from the images; a masked one has the pixels of the other patches at zero."""

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
    monkeypatch.setitem(registry.FAMILIES, ToyNet, ToyBackbone)


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


@pytest.mark.parametrize("name", ADAPTED)
def test_a_prediction_is_the_models_from_before_the_update(name: str) -> None:
    method, source = make(name, lr=0.1), make(name)
    images = random_images(5, 0)
    expected = source.predict(images)
    if name != "roid":  # which corrects for the batch's classes
        with torch.no_grad():
            torch.testing.assert_close(expected, ToyNet()(images))
    assert torch.equal(method(images), expected)
    assert not torch.allclose(method.predict(images), expected, atol=1e-5)


@pytest.mark.parametrize(("name", "adapted"), ADAPTED.items())
def test_only_the_chosen_weights_change(name: str, adapted: set[str]) -> None:
    net, source = ToyNet(), ToyNet().state_dict()
    method = make(name, net)
    for seed in range(3):
        run(method, seed)
    changed = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, source[name])}
    assert changed == set(method.adapted_names) == adapted
    assert all(torch.equal(source[name] + change, net.state_dict()[name]) for name, change in method.delta().items())


@pytest.mark.parametrize("name", ADAPTED)
def test_a_state_goes_on_bit_for_bit_and_a_reset_is_exact(name: str) -> None:
    through, resumed = make(name), make(name)
    for seed in range(2):
        run(through, seed)
    resumed.load_state(copy.deepcopy(through.state()))
    assert through.num_updates == resumed.num_updates > 0
    for seed in range(2, 4):
        assert torch.equal(run(resumed, seed), run(through, seed))
    assert all(torch.equal(tensor, through.state()[key]) for key, tensor in resumed.state().items())
    resumed.reset()
    source = ToyNet().state_dict()
    assert all(torch.equal(tensor, source[key]) for key, tensor in _net(resumed).state_dict().items())
    assert torch.equal(resumed.predict(random_images(5, 9)), make(name).predict(random_images(5, 9)))


def _net(method: Method) -> ToyNet:
    assert method.trains and isinstance(method.net.model, ToyNet)
    return method.net.model


def plain_rem_step(net: ToyNet, images: Tensor, ratios: Sequence[float], margin: float, lr: float) -> Tensor:
    """Eq. 3 to 5 image by image and pair by pair, masks patch by patch, and a step of plain gradient descent."""
    strengths = net.map_of(images).detach().pow(2).sum(-1).sqrt().flatten(1)
    views = []
    for ratio in ratios:
        masked = images.clone()
        for number in range(len(images)):
            most = strengths[number].argsort(descending=True)[: GRID * GRID - int(GRID * GRID * (1 - ratio))]
            for row, column in (divmod(int(place), GRID) for place in most):
                masked[number, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 0
        views.append(net(masked).softmax(-1))
    loss = torch.zeros(())
    for first, second in combinations(views, 2):
        for p, q in zip(first, second, strict=True):
            loss = loss - (p.detach() * q.log()).sum()
            order = -(p * p.log()).sum() + (q * q.log()).sum().detach() + margin * math.log(NUM_CLASSES)
            loss = loss + order.clamp(min=0)
    norms = [parameter for name, parameter in net.named_parameters() if name in FIRST_BLOCKS]
    gradients = torch.autograd.grad(loss / len(images), norms)
    with torch.no_grad():
        for parameter, gradient in zip(norms, gradients, strict=True):
            parameter.sub_(lr * gradient)
    logits: Tensor = views[0].detach().log()
    return logits


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch": 2}, {"margin": 0.1}, {"confident_below": 1.0, "margin": 0.1}], ids=str
)
@pytest.mark.parametrize("share", [1.0, 0.0])  # at 0 the plain view gets its graph only where it violates the order
def test_rem_is_its_plain_reading(settings: dict[str, Any], share: float) -> None:
    ratios = (0.0, 0.25, 0.5)
    config = REMConfig(ratios, masking="features", optimizer="sgd", momentum=0.0, lr=0.05, **settings)
    rem, plain = REM(ToyNet(), config), ToyNet()
    for seed in range(4):
        rem.objective.memory["violating_share"].fill_(share)
        images = random_images(5, seed)
        expected = plain_rem_step(plain, images, ratios, config.margin, config.lr)
        torch.testing.assert_close(rem(images).log_softmax(-1), expected, atol=1e-5, rtol=1e-4)
    moved = dict(plain.named_parameters())
    for name, parameter in rem.net.model.named_parameters():
        torch.testing.assert_close(parameter, moved[name], atol=1e-5, rtol=1e-4)
    assert max(float(change.abs().max()) for change in rem.delta().values()) > 1e-3


@pytest.mark.parametrize("name", ["rem", "tent"])
def test_the_guard_takes_a_harmful_run_back_to_the_source(name: str) -> None:
    method = make(name, lr=3.0)
    assert method.trains
    guard = Guard(method, GuardOptions(window=32, memory=1, least=10, retries=1))
    for seed in range(12):
        guard(random_images(5, seed))
    kinds = [event["event"] for event in guard.judge.events()]
    assert kinds.count("rollback") == 1 and guard.judge.retired
    with torch.no_grad():
        torch.testing.assert_close(guard(random_images(5, 20)), ToyNet()(random_images(5, 20)))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*IN_BETWEEN, *ZERO_SHOT, "norm")])
def test_every_method_that_stays_outside_the_blocks_runs(name: str) -> None:
    method = make(name)
    for seed in range(2):
        assert torch.isfinite(run(method, seed)).all()
    assert method.num_updates > 0 or not method.adapts


@pytest.mark.parametrize("name", IN_BETWEEN)
def test_methods_that_reach_in_between_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"reaches in between a transformer's blocks, and ToyNet has no tokens"):
        make(name)


def test_scores_that_cannot_be_had_are_refused_before_any_image() -> None:
    with pytest.raises(ModelError, match="no attention to mask by"):
        make("rem", masking="background")
    random = make("rem", masking="random")
    assert torch.isfinite(run(random, 0)).all() and random.num_updates == 1


def test_layers_are_numbered_along_the_forward_pass() -> None:
    backbone = backbone_of(ToyNet())
    assert set(adapted_norms(backbone, "1,3")) == norm_names(1, 3)
    assert list(adapted_norms(backbone, "all")) == [name for name, _ in ToyNet().named_parameters() if "norm" in name]


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 of shape \(B, 3, 32, 32\)"):
        make("tent")(random_images(2, size=24))


def test_a_vit_has_tokens_and_the_toy_has_none() -> None:
    assert isinstance(backbone_of(tiny_vit()), ViT) and isinstance(backbone_of(tiny_vit()), TokenBackbone)
    assert isinstance(backbone_of(ToyNet()), Backbone) and not isinstance(backbone_of(ToyNet()), TokenBackbone)


def test_memory_and_products_are_measured_on_it() -> None:
    method = make("tent")
    assert method.trains
    assert fitting_micro_batch(method, (32, 32), 8, 2**40) is None
    product = BareProduct(backbone_of(ToyNet()), 2, contextlib.nullcontext())
    assert product.flop == 2.0 * 2 * GRID * GRID * 2 * WIDTH * WIDTH
    assert product().shape == (2 * GRID * GRID, 2 * WIDTH)


def test_a_whole_run_adapts_it(frames: Path, tmp_path: Path) -> None:
    config = REMConfig(masking="features")
    summary = adapt_stream(ToyNet(), frames, tmp_path / "run", config=config, options=RunOptions(batch_size=4))
    assert (summary.num_frames, summary.num_updates) == (12, 3)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert set(record["adapted"]) == FIRST_BLOCKS
