"""Continual-MAE, against a plain second implementation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta.baselines.continual_mae import ContinualMAE, ContinualMAEConfig, hog_patches
from remtta.errors import UsageError
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, pipeline_of

CONFIG = ContinualMAEConfig(num_dropouts=3, lr=0.02, optimizer="sgd", restore=0.0)
SOBEL = ((-1, 1), (0, 2), (1, 1))  # offset and weight


def _plain_hog(padded: Tensor, top: int, left: int) -> list[float]:
    """Compute HOG for one colour of one 4 x 4 patch, pixel by pixel, from the padded image."""
    votes = [0.0] * 9
    for y in range(4):
        for x in range(4):
            row, column = top + y + 1, left + x + 1
            dx = sum(w * float(padded[row + n, column + 1] - padded[row + n, column - 1]) for n, w in SOBEL)
            dy = sum(w * float(padded[row + 1, column + n] - padded[row - 1, column + n]) for n, w in SOBEL)
            votes[math.floor(math.atan2(dx, dy) / math.pi * 9) % 9] += math.hypot(dx, dy)
    length = math.sqrt(sum(vote * vote for vote in votes))
    return [vote / length for vote in votes]


def test_histograms_equal_a_count_pixel_by_pixel() -> None:
    pixels = random_images(1, size=8).sigmoid()
    got = hog_patches(pixels, (4, 4))
    assert got.shape == (1, 4, 27)
    padded = torch.nn.functional.pad(pixels, (1, 1, 1, 1), mode="reflect")[0]
    for number, (top, left) in enumerate([(0, 0), (0, 4), (4, 0), (4, 4)]):
        expected = [v for colour in range(3) for v in _plain_hog(padded[colour], top, left)]
        torch.testing.assert_close(got[0, number], torch.tensor(expected))


def _dropped(tokens: Tensor, seeds: Tensor) -> Tensor:
    """Drop a tenth of the values of each image's tokens, by the image's own seed."""
    draws = [torch.rand(tokens.shape[1:], generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.where(torch.stack(draws) < 0.1, 0.0, tokens / 0.9)


def _plain_loss(model: Any, decoder: dict[str, Tensor], images: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        target = model(images).softmax(1)
        tokens = model._pos_embed(model.patch_embed(images))
        features = torch.stack([model.norm(model.blocks(_dropped(tokens, seeds[:, n]))) for n in range(3)])
        variance = features.var(0, correction=0).sum(-1)[:, 1:]
        hidden = torch.stack([row >= row.sort().values[32] for row in variance])  # 32 of 64 patches
        assert (hidden.sum(1) == 32).all()
    patches = model.patch_embed(images)
    patches = torch.where(hidden[..., None], decoder["mask_token"], patches)
    x = torch.cat([model.cls_token.expand(len(images), -1, -1), patches], 1) + model.pos_embed
    x = model.norm(model.blocks(x))
    agree = -(target * model.head(x[:, 0]).log_softmax(1)).sum(1).mean()
    described = x[:, 1:] @ decoder["hog.weight"].T + decoder["hog.bias"]
    truth = hog_patches((images / 2 + 0.5).clamp(0, 1), (4, 4))
    error = ((described - truth) ** 2)[hidden].mean()
    return target, agree + 0.5 * error


def test_three_updates_equal_a_plain_loop() -> None:
    mae, model = pipeline_of(ContinualMAE, tiny_vit(), CONFIG), tiny_vit()
    decoder = {name: tensor.detach().clone().requires_grad_() for name, tensor in mae.method.buffers.items()}
    model.cls_token.requires_grad_(False)  # as in the official code, only what is called weight or bias learns
    model.pos_embed.requires_grad_(False)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD([*learning, *decoder.values()], lr=0.02, momentum=0.9)
    drawn = mae.method.model.generator.clone_state()
    start = {name: tensor.detach().clone() for name, tensor in decoder.items()}
    for seed in range(3):
        images = random_images(4, seed)
        seeds = torch.randint(2**62, (4, 3), generator=drawn)
        target, loss = _plain_loss(model, decoder, images, seeds)
        torch.testing.assert_close(mae(images).softmax(1), target, atol=1e-5, rtol=1e-4)
        descend(optimizer, loss)
        for _ in mae.method.model.weights.parameters:  # a restoration of no share still draws
            torch.randint(2**62, (), generator=drawn)
    adapted, wanted = (dict(each.named_parameters()) for each in (mae.method.model.model, model))
    torch.testing.assert_close(adapted, wanted, atol=1e-5, rtol=1e-3)
    assert all((mae.method.trained[name] - tensor).abs().max() > 1e-4 for name, tensor in start.items())
    assert (*mae.method.passes(), mae.method.num_models) == (5, 1, 2)
    assert pipeline_of(ContinualMAE, tiny_vit()).method.passes()[0] == 12


def test_a_share_that_masks_no_patch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mask ratio 0\.01 masks none of 64 patches; choose a larger one"):
        pipeline_of(ContinualMAE, tiny_vit(), ContinualMAEConfig(mask_ratio=0.01))
