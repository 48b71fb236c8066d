from __future__ import annotations

import math
from typing import Any

import pytest
import timm
import torch
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn

from remtta.backbones.attention import class_attention
from remtta.backbones.vit import ViT
from remtta.errors import ModelError
from tests.conftest import TINY, random_images, tiny_vit

WIDTH, HEADS, TOKENS = 12, 3, 9


def _random_block(kind: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    block = kind(WIDTH, HEADS, **kwargs).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.6)
    return block


def _tokens() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def _layer_norm(norm: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normed: Tensor = centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    return normed


def _whole_maps(x: Tensor, weight: Tensor, bias: Tensor | None, q_norm: Any = None, k_norm: Any = None) -> Tensor:
    """Eq. 2 in full: one map (B, T, T) per head, from the rows of the projection that make q and k."""
    size = WIDTH // HEADS
    maps = []
    for head in range(HEADS):
        rows = slice(head * size, (head + 1) * size)
        parts = []
        for offset, norm in ((0, q_norm), (WIDTH, k_norm)):
            part = x @ weight[offset : offset + WIDTH][rows].T
            if bias is not None:
                part = part + bias[offset : offset + WIDTH][rows]
            parts.append(part if norm is None else _layer_norm(norm, part))
        scores = parts[0] @ parts[1].transpose(1, 2) / math.sqrt(size)
        maps.append(scores.exp() / scores.exp().sum(-1, keepdim=True))
    return torch.stack(maps, dim=1)


def _maps_of(attn: Any, x: Tensor) -> Tensor:
    norms = (attn.q_norm, attn.k_norm) if isinstance(attn.q_norm, nn.LayerNorm) else (None, None)
    return _whole_maps(x, attn.qkv.weight, attn.qkv.bias, *norms)


@pytest.mark.parametrize(
    "kwargs", [{"qkv_bias": True}, {"qkv_bias": False}, {"qkv_bias": True, "qk_norm": True}], ids=str
)
def test_attention_of_a_block_is_the_class_row_of_its_map(kwargs: dict[str, bool]) -> None:
    block, tokens = _random_block(Block, **kwargs), _tokens()
    x = _layer_norm(block.norm1, tokens)
    maps = _maps_of(block.attn, x)
    torch.testing.assert_close(class_attention(block, tokens), maps[:, :, 0].sum(1))
    # The map written out above is the one timm multiplies the values with.
    values = (x @ block.attn.qkv.weight[2 * WIDTH :].T).unflatten(-1, (HEADS, -1)).transpose(1, 2)
    if kwargs["qkv_bias"]:
        values = values + block.attn.qkv.bias[2 * WIDTH :].view(HEADS, 1, -1)
    torch.testing.assert_close(block.attn.proj((maps @ values).transpose(1, 2).flatten(2)), block.attn(x))


def test_attention_of_a_post_norm_block_is_taken_before_its_norm() -> None:
    block, tokens = _random_block(ResPostBlock, qkv_bias=True), _tokens()
    torch.testing.assert_close(class_attention(block, tokens), _maps_of(block.attn, tokens)[:, :, 0].sum(1))


@pytest.mark.parametrize("kwargs", [{"qkv_bias": True}, {"qkv_bias": False, "qk_norm": True}], ids=str)
def test_attention_of_a_parallel_scaling_block_skips_its_mlp_rows(kwargs: dict[str, bool]) -> None:
    block, tokens = _random_block(ParallelScalingBlock, **kwargs), _tokens()
    hidden = 4 * WIDTH  # the fused projection makes the MLP's input first, then q, k and v
    bias = block.in_proj.bias[hidden:] if kwargs["qkv_bias"] else None
    norms = (block.q_norm, block.k_norm) if kwargs.get("qk_norm") else (None, None)
    maps = _whole_maps(_layer_norm(block.in_norm, tokens), block.in_proj.weight[hidden:], bias, *norms)
    torch.testing.assert_close(class_attention(block, tokens), maps[:, :, 0].sum(1))


def test_attention_of_parallel_branches_is_their_sum() -> None:
    block, tokens = _random_block(ParallelThingsBlock, qkv_bias=True), _tokens()
    rows = [_maps_of(part.attn, _layer_norm(part.norm, tokens))[:, :, 0].sum(1) for part in block.attns]
    torch.testing.assert_close(class_attention(block, tokens), rows[0] + rows[1])


def test_attention_sums_to_the_number_of_heads() -> None:
    row = class_attention(_random_block(Block), _tokens())
    assert row.shape == (2, TOKENS)
    assert (row >= 0).all()
    torch.testing.assert_close(row.sum(1), torch.full((2,), float(HEADS)))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: _random_block(Block, attn_layer="diff", norm_layer=LayerNorm), "DiffAttention"),
        (lambda: nn.Linear(WIDTH, WIDTH), "Linear"),
    ],
)
def test_a_block_without_a_softmax_row_is_refused_by_name(make: Any, kind: str) -> None:
    with pytest.raises(ModelError, match=f"{kind} has no softmax attention row"):
        class_attention(make(), _tokens())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reg_tokens": 3},
        {"global_pool": "avg", "qk_norm": True},
        {"qk_norm": True, "init_values": 0.3, "scale_attn_norm": True, "qkv_bias": False},
        {"pre_norm": True, "no_embed_class": True},
        {"block_fn": ResPostBlock},
        {"block_fn": ParallelScalingBlock},
        {"block_fn": ParallelThingsBlock},
    ],
    ids=str,
)
def test_the_two_passes_give_the_models_own_logits(changes: dict[str, Any]) -> None:
    vit: Any = tiny_vit(depth=2, **changes)
    backbone, images = ViT(vit), random_images(3)
    with torch.no_grad():
        expected = vit(images)
        tokens = backbone.embed(images)
        assert tokens.shape == (3, vit.num_prefix_tokens + 64, 48)
        torch.testing.assert_close(backbone.classify(tokens), expected)
        logits, cls_attn = backbone.classify_with_scores(tokens, "attention")
        torch.testing.assert_close(logits, expected)
        last_input = vit.blocks[0](tokens)
    whole_row = class_attention(vit.blocks[1], last_input)
    assert torch.equal(cls_attn, whole_row[:, vit.num_prefix_tokens :])


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("vit_tiny_patch16_224", {}, 1),
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, 1),
        ("deit_tiny_distilled_patch16_224", {}, 2),
        ("vit_tiny_patch16_224", {"global_pool": "avg"}, None),
        ("vit_tiny_patch16_224", {"global_pool": "map"}, None),
    ],
)
def test_only_tokens_the_classifier_reads_are_computed_in_the_last_block(
    name: str, changes: dict[str, Any], expected: int | None
) -> None:
    vit: Any = timm.create_model(name, **{**TINY, **changes}).eval()
    backbone = ViT(vit)
    assert backbone.num_tokens_read == expected
    seen = []
    vit.blocks[-1].mlp.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    with torch.no_grad():
        torch.testing.assert_close(backbone.logits(random_images(2)), vit(random_images(2)))
    everything = vit.num_prefix_tokens + 64
    assert seen == [expected or everything, everything]


def test_logits_carry_gradients_and_the_attention_none() -> None:
    backbone = ViT(tiny_vit(depth=2))
    logits, cls_attn = backbone.classify_with_scores(backbone.embed(random_images(2)), "attention")
    assert logits.requires_grad
    assert not cls_attn.requires_grad


def test_embedding_moves_with_the_image_size_where_the_model_allows_it() -> None:
    vit: Any = tiny_vit(depth=1, dynamic_img_size=True)
    images = random_images(2, size=48)
    with torch.no_grad():
        torch.testing.assert_close(ViT(vit).logits(images), vit(images))
        assert ViT(vit).embed(images).shape == (2, 1 + 144, 48)
