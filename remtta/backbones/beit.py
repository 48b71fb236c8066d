"""timm's Beit (BEiT, BEiT v2): what its attentions add to their scores depends on where two patches lie to each other.

A masked view takes the rows and columns of this bias that belong to the tokens it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from timm.models.beit import Beit
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.attention import class_attention, qkv_bias
from remtta.backbones.tokens import Transformer, gather_patches


class _Place(NamedTuple):
    """The bias (H, T, T) that all blocks share, if they do, and the patches kept (B, K); None for all."""

    shared: Tensor | None
    kept: Tensor | None


class BEiT(Transformer):
    """A timm Beit, with a relative position bias of each block, one for all, both or none.

    Args:
        module: The model; forward passes expect it in eval mode.

    Raises:
        ModelError: If it runs in a way of its own, or does not pool its tokens.
    """

    architecture = Beit
    kinds: ClassVar[Mapping[str, str]] = {"BEiT and BEiT v2 (relative position bias)": "beit_base_patch16_224"}

    def _begin(self, embedded: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[_Place]]:
        beit = self.module
        tokens = torch.cat((beit.cls_token.expand(len(embedded), -1, -1), embedded), dim=1)
        if beit.pos_embed is not None:
            tokens = tokens + beit.pos_embed
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        shared = None if beit.rel_pos_bias is None else beit.rel_pos_bias()
        return tokens, [_Place(shared, kept)] * len(self.blocks)

    def _run(self, block: Any, tokens: Tensor, place: _Place) -> Tensor:
        if place.kept is None:
            whole: Tensor = block(tokens, shared_rel_pos_bias=place.shared)
            return whole
        mixed = _attend(block.attn, block.norm1(tokens), _bias(block.attn, place))
        tokens = tokens + (mixed if block.gamma_1 is None else block.gamma_1 * mixed)
        hidden = block.mlp(block.norm2(tokens))
        after: Tensor = tokens + (hidden if block.gamma_2 is None else block.gamma_2 * hidden)
        return after

    def _class_attention(self, tokens: Tensor, place: _Place) -> Tensor:
        last: Any = self.blocks[-1]
        return class_attention(last, tokens, bias=_bias(last.attn, place))


def _bias(attn: Any, place: _Place) -> Tensor | None:
    """What an attention adds to its scores, (1 or B, H, T, T), for the tokens that are there."""
    own = None if attn.relative_position_bias_table is None else attn._get_rel_pos_bias().squeeze(0)
    parts = [part for part in (own, place.shared) if part is not None]
    if not parts:
        return None
    bias = torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
    return bias.unsqueeze(0) if place.kept is None else gather_bias(bias, place.kept)


def gather_bias(bias: Tensor, kept: Tensor) -> Tensor:
    """Rows and columns of a bias (H, 1 + N, 1 + N) for the class token and the patches kept (B, K): (B, H, T, T)."""
    tokens = F.pad(kept + 1, (1, 0))  # the class token is the first
    return bias[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)


def _attend(attn: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """timm's attention of these tokens (B, T, D) with this bias in place of its own, which is for all tokens."""
    q, k, v = F.linear(x, attn.qkv.weight, qkv_bias(attn)).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    attended: Tensor = attn.proj(mixed.transpose(1, 2).flatten(2))
    return attended
