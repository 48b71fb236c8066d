import logging
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.models import precision
from remtta.models.metadata import Bf16Weights
from remtta.models.precision import ForwardContext, LinearLayers
from tests.conftest import TINY, raising, random_images, tiny_vit


def gradients(model: nn.Module, images: Tensor, layers: LinearLayers | None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    if layers is None:
        logits = model(images)
    else:
        with layers:
            logits = model(images)
    logits.float().logsumexp(-1).sum().backward()
    return logits.detach().float(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, "embed_dim": 96, "num_heads": 3, "qk_norm": True})


@pytest.fixture
def no_cached_product() -> Iterator[None]:
    precision.linear_product.cache_clear()
    yield
    precision.linear_product.cache_clear()


@pytest.mark.usefixtures("no_cached_product")
@pytest.mark.parametrize("onednn", [True, False])
def test_logits_and_every_gradient_are_those_of_torch_with_and_without_onednn(
    onednn: bool, model: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "remtta")
    if not onednn:
        monkeypatch.setattr(precision, "onednn_linear", raising(RuntimeError("no such operator")))
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    images = random_images(3, seed=1)
    logits, grads = gradients(model, images, LinearLayers())
    plain_logits, plain_grads = gradients(model, images, None)
    assert onednn or precision.linear_product(torch.float32) is F.linear
    torch.testing.assert_close(logits, plain_logits, rtol=1e-5 * onednn, atol=1e-5 * onednn)
    assert grads.keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(grads, plain_grads, rtol=1e-4 * onednn, atol=1e-5 * onednn)


def test_bf16_is_near_and_leaves_the_head_exact(model: Any) -> None:
    images = random_images(3, seed=1)
    plain_logits, plain_grads = gradients(model, images, None)
    layers = LinearLayers("bf16", exact=model.get_classifier().parameters())
    logits, grads = gradients(model, images, layers)
    assert 0 < (logits - plain_logits).norm() / plain_logits.norm() < 0.02
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert (grad - plain_grads[name]).norm() < 0.05 * plain_grads[name].norm() + 1e-4, name
    with layers:
        assert F.linear(torch.randn(2, 96), model.head.weight).dtype == torch.float32
        assert F.linear(torch.randn(2, 96), model.blocks[0].attn.qkv.weight).dtype == torch.bfloat16


def test_frozen_weights_are_converted_once_and_again_when_changed() -> None:
    frozen, learning = nn.Parameter(torch.ones(4, 4), requires_grad=False), nn.Parameter(torch.ones(4, 4))
    converted: Bf16Weights = {}
    with LinearLayers("bf16", converted=converted):
        F.linear(torch.ones(2, 4), frozen)
        ((_, _, first),) = converted.values()
        for weight in (learning, frozen):
            F.linear(torch.ones(2, 4), weight)
            assert [copy is first for _, _, copy in converted.values()] == [True]
        with torch.no_grad():
            frozen.mul_(2)
            assert F.linear(torch.ones(2, 4), frozen).tolist() == [[8.0] * 4] * 2
        with torch.inference_mode():
            assert F.linear(torch.ones(2, 4), frozen).tolist() == [[8.0] * 4] * 2


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (2, 0, 4)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_shape_of_input(shape: tuple[int, ...], dtype: str) -> None:
    weight = torch.arange(12.0).view(3, 4)
    x = torch.ones(shape, requires_grad=True)
    with LinearLayers(dtype):
        y = F.linear(x, weight, bias=torch.ones(3))
    assert y.shape == (*shape[:-1], 3)
    assert torch.equal(y.detach().float(), F.linear(x, weight, torch.ones(3)).detach())
    y.float().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.tensor([12.0, 15.0, 18.0, 21.0]).expand(shape))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_bf16_is_torchs(masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, 5, 8, dtype=torch.bfloat16) for _ in range(3))
    mask = torch.rand(5, 5) < 0.5 if masked else None
    mask = mask.logical_or(torch.eye(5, dtype=torch.bool)) if mask is not None else None
    with LinearLayers("bf16"):
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), attn_mask=mask)
    torch.testing.assert_close(result.float(), wanted, rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("no_cached_product")
def test_without_avx512_the_products_are_torchs_and_bf16_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with caplog.at_level(logging.WARNING, "remtta"):
        assert precision.linear_product(torch.float32) is F.linear
        assert not caplog.records
        assert precision.linear_product(torch.bfloat16) is F.linear
    assert "use --precision fp32" in caplog.text


def test_a_compiled_model_keeps_its_own_products() -> None:
    vit: Any = tiny_vit()
    assert isinstance(ForwardContext(vit, "fp32")(torch.device("cpu")), LinearLayers)
    vit.blocks[0]._compiled_call_impl = vit.blocks[0]._call_impl  # as torch.compile leaves it
    assert not isinstance(ForwardContext(vit, "fp32")(torch.device("cpu")), LinearLayers)
