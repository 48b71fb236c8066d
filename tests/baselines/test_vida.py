"""ViDA, against a plain model with adapters beside its attention layers."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta.baselines.augmentations import jitter
from remtta.baselines.vida import ViDA, ViDAConfig
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, pipeline_of, predicted, symmetric

CONFIG = ViDAConfig(lr=0.02, adapter_lr=0.05, high_rank=8, num_augmentations=3, teacher_decay=0.9)


class _Adapted(nn.Module):
    """A linear layer with two adapters beside it."""

    def __init__(self, linear: nn.Linear, downs: list[Tensor]) -> None:
        super().__init__()
        self.linear = linear
        self.downs = nn.ParameterList([down.clone() for down in downs])
        self.ups = nn.ParameterList([torch.zeros(linear.out_features, len(down)) for down in downs])
        self.scales = [1.0, 1.0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        for scale, down, up in zip(self.scales, self.downs, self.ups, strict=True):
            out = out + scale * (x @ down.T @ up.T)
        return out


def _with_adapters(vida: Pipeline) -> tuple[Any, list[_Adapted]]:
    model: Any = tiny_vit()
    layers = []
    for number, block in enumerate(model.blocks):
        for name in ("qkv", "proj"):
            key = f"blocks.{number}.attn.{name}.weight"
            downs = [vida.method.trained[f"{key}.{kind}.down"].detach() for kind in ("low", "high")]
            layers.append(_Adapted(getattr(block.attn, name), downs))
            setattr(block.attn, name, layers[-1])
    return model, layers


def _unsure(model: nn.Module, images: Tensor, generator: torch.Generator) -> float:
    pixels = (images / 2 + 0.5).clamp(0, 1)  # the tiny model's mean and deviation are 0.5
    with torch.no_grad():
        views = torch.stack([model(jitter(pixels, generator) * 2 - 1) for _ in range(3)])
    return float(((views - views.mean(0)) ** 2).sum(0).div(2).mean() / 10)


@pytest.mark.parametrize("threshold", [0.0, 9.0])
def test_three_updates_equal_adapters_that_run_beside_the_layers(threshold: float) -> None:
    vida = pipeline_of(ViDA, tiny_vit(), dataclasses.replace(CONFIG, threshold=threshold))
    (student, fast), (teacher, slow) = _with_adapters(vida), _with_adapters(vida)
    adapters = [p for layer in fast for p in (*layer.downs, *layer.ups)]
    known = {id(p) for p in adapters}
    weights = [p for p in student.parameters() if id(p) not in known]
    optimizer = torch.optim.SGD(
        [{"params": weights, "lr": 0.02}, {"params": adapters, "lr": 0.05}], momentum=0.9, nesterov=True
    )
    drawn = vida.method.model.generator.clone_state()
    for seed in range(3):
        images = random_images(5, seed)
        unsure = _unsure(teacher, images, drawn)
        low, high = (1 - unsure, 1 + unsure) if threshold == 0 else (1 + unsure, 1 - unsure)
        for layer in fast + slow:
            layer.scales = [low, high]
        with torch.no_grad():
            target = teacher(images)
        torch.testing.assert_close(vida(images), target, atol=1e-4, rtol=1e-4)
        descend(optimizer, symmetric(student(images), target))
        slow_adapters = {id(p) for layer in slow for p in (*layer.downs, *layer.ups)}
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                decay = 0.8 if id(old) in slow_adapters else 0.9
                old.copy_(decay * old + (1 - decay) * new)
    assert all(layer.ups[0].abs().max() > 1e-5 and layer.ups[1].abs().max() > 1e-5 for layer in slow)
    with torch.no_grad():
        images = random_images(3, 9)
        torch.testing.assert_close(predicted(vida, images), teacher(images), atol=1e-4, rtol=1e-4)
