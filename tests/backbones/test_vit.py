"""The shortcut through the last block of timm's VisionTransformer."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from remtta.backbones.vit import ViT
from tests.conftest import TINY, random_images, tiny_vit


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("vit_tiny_patch16_224", {"reg_tokens": 4}, 1),
        ("deit_tiny_distilled_patch16_224", {}, 2),
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
