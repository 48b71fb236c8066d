"""timm's Eva: EVA, EVA-02, DINOv3, Perception Encoder and the ViTs with rotary positions.

Rotary positions rotate queries and keys in every block, so a masked view selects those of the patches it keeps along
with their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from timm.models.eva import Eva
from torch import Tensor

from remtta.backbones.tokens import Transformer, gather_patches


class RotaryViT(Transformer):
    """A timm Eva, with or without rotary positions, which may differ between blocks and heads."""

    architecture = Eva
    kinds: ClassVar[Mapping[str, str]] = {
        "EVA": "eva_giant_patch14_224",
        "EVA-02, rotary positions": "eva02_base_patch14_448",
        "DINOv3": "vit_base_patch16_dinov3",
        "ViT with rotary positions": "vit_base_patch16_rope_224",
        "ViT with rotary positions of each block": "vit_base_patch16_rope_mixed_224",
        "ViT with rotary positions, average pooling, a register": "vit_base_patch16_rope_reg1_gap_256",
        "Perception Encoder, class token and attention pooling": "vit_pe_core_base_patch16_224",
    }

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[Tensor | None]]:
        tokens, rope = self.module._pos_embed(patches)
        tokens = self.module.norm_pre(tokens)
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        mixed = rope is not None and getattr(self.module, "rope_mixed", False)  # each block has its own
        ropes = list(rope) if mixed else [rope] * len(self.blocks)
        if kept is not None:
            ropes = [None if each is None else gather_rope(each, kept) for each in ropes]
        return tokens, ropes

    def _run(self, block: Any, tokens: Tensor, place: Tensor | None) -> Tensor:
        return block(tokens, rope=place)


def gather_rope(rope: Tensor, kept: Tensor) -> Tensor:
    """Return the rotary positions of the patches kept (B, K), in the form of timm's attentions.

    (N, d) become (B, 1, K, d); per-head positions (H, N, d) become (B, H, K, d).
    """
    if rope.ndim == 2:
        return rope[kept].unsqueeze(1)
    return rope[:, kept].transpose(0, 1)
