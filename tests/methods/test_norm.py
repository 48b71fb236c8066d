"""NORM against a plain second writing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from remtta.errors import ModelError
from remtta.methods.method import build_method
from remtta.methods.norm import NORM, NORMConfig
from remtta.methods.settings import method_config
from tests.backbones.tiny_models import pictures, tiny
from tests.methods.making import made


@torch.no_grad()
def plain_norm(model: nn.Module, images: torch.Tensor, prior: float) -> torch.Tensor:
    """Layer by layer, in the order of the forward pass: write blended statistics into each, then go on."""
    n = len(images)

    def blend(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        values = inputs[0].transpose(0, 1).flatten(1)
        layer.running_mean.copy_((n * values.mean(1) + prior * layer.running_mean) / (n + prior))
        layer.running_var.copy_((n * values.var(1, correction=0) + prior * layer.running_var) / (n + prior))

    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(blend)
    logits: torch.Tensor = model(images)
    return logits


@pytest.mark.parametrize(
    ("family", "count", "prior", "counts_for"),
    [("efficientnet", 4, None, 12), ("resnet", 20, None, 0), ("resnet", 4, 16, 16)],
)
def test_norm_is_its_plain_reading(family: str, count: int, prior: int | None, counts_for: int) -> None:
    model = tiny(family)
    source = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    norm, images = made(NORM, model, NORMConfig(bn_prior=prior)), pictures(count)
    expected = plain_norm(tiny(family), images, counts_for)
    assert not torch.allclose(expected, tiny(family)(images), atol=1e-2)
    torch.testing.assert_close(norm(images), expected, atol=1e-4, rtol=1e-3)
    assert torch.equal(norm.predict(images), norm.answer(images))
    assert all(torch.equal(tensor, source[key]) for key, tensor in model.state_dict().items())
    assert (norm.adapts, norm.num_updates, norm.objective.num_trained, norm.delta()) == (False, 0, 0, {})
    assert norm.objective.delta_refusal is not None and norm.objective.passes() == (1, 0)


def test_recent_statistics_become_the_running_ones() -> None:
    norm = made(NORM, tiny("resnet"), NORMConfig(bn="recent"))
    assert norm.adapts and norm.objective.delta_refusal is None
    source = tiny("resnet")(pictures(8)).detach()
    first = norm(pictures(8))
    assert norm.num_updates == 1 and not torch.allclose(first, source, atol=1e-3)
    assert set(norm.delta()) == {name for name in tiny("resnet").state_dict() if "running" in name}
    torch.testing.assert_close(norm.net.model(pictures(8)), first)  # no image came before these
    norm.reset()
    assert torch.equal(norm(pictures(8)), first)
    torch.testing.assert_close(norm.predict_source(pictures(8)), source)


def test_models_without_batch_norms_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^norm needs batch norms with running statistics, and the model has none"):
        build_method("norm", tiny("convnext"), method_config("norm", {}, batch_size=8))
