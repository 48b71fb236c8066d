"""timm's Beit (BEiT, BEiT v2), whose attention adds a bias that depends on the relative position of two patches.

A masked view selects the rows and columns of the bias that belong to the tokens it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from timm.models.beit import Beit
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.backbone import patched_method
from remtta.backbones.tokens import Transformer, gather_patches

_BlockInput = tuple[Tensor | None, Tensor | None]
"""The bias shared by all blocks, if any, in the form of timm's blocks; and the patches kept (B, K), or None."""


class BEiT(Transformer):
    """A timm Beit: a class token before the patches, and a bias (H, 1 + N, 1 + N) per block, shared, both or none."""

    architecture = Beit
    kinds: ClassVar[Mapping[str, str]] = {"BEiT and BEiT v2 (relative position bias)": "beit_base_patch16_224"}

    @property
    def num_passing(self) -> int:
        """Includes each image's bias in a masked view."""
        first: Any = self.blocks[0]
        return super().num_passing + int(first.attn.num_heads) * self.num_tokens**2

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[_Place]]:
        model = self.module
        tokens = torch.cat((model.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        if model.pos_embed is not None:
            tokens = tokens + model.pos_embed
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        shared = None if model.rel_pos_bias is None else model.rel_pos_bias()
        if kept is not None and shared is not None:
            shared = gather_bias(shared, kept, self.num_prefix_tokens)
        return tokens, [(shared, kept)] * len(self.blocks)

    def _run(self, block: Any, tokens: Tensor, place: _BlockInput) -> Tensor:
        shared, kept = place
        if kept is None:
            return block(tokens, shared)
        if block.attn.relative_position_bias_table is None:
            return block.forward(tokens, shared)
        whole = block.attn._get_rel_pos_bias

        def bias() -> Tensor:
            return gather_bias(whole(), kept, self.num_prefix_tokens)

        with patched_method(block.attn, "_get_rel_pos_bias", bias):
            return block.forward(tokens, shared)  # not compiled, which would bypass the patch


def gather_bias(bias: Tensor, kept: Tensor, num_prefix_tokens: int) -> Tensor:
    """Select rows and columns (B, H, P + K, P + K) of a bias (1, H, P + N, P + N) for patches kept (B, K); P <= 1."""
    tokens = F.pad(kept + num_prefix_tokens, (num_prefix_tokens, 0))
    return bias[0, :, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)
