"""Transformers whose attention adds a bias that depends on the relative position of two patches.

These are timm's Beit (BEiT, BEiT v2) and VisionTransformerRelPos. A masked view selects the rows and columns of the
bias that belong to the tokens it keeps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from timm.models.beit import Beit
from timm.models.vision_transformer_relpos import RelPosBlock, VisionTransformerRelPos
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.attention import class_attention, qkv_bias
from remtta.backbones.tokens import Transformer, gather_patches


class _Place(NamedTuple):
    """The bias shared by all blocks, if any, in the form of timm's blocks; and the patches kept (B, K), or None."""

    shared: Tensor | None
    kept: Tensor | None


class _BiasedViT(Transformer):
    """At most a class token before the patches, and a bias (H, P + N, P + N)."""

    shared_argument: ClassVar[str]
    """Argument by which blocks take the shared bias."""

    @abstractmethod
    def _shared_bias(self) -> Tensor | None:
        """Return the bias shared by all blocks, in the form they take."""

    @abstractmethod
    def _bias(self, attn: Any, shared: Tensor | None) -> Tensor | None:
        """Return the bias that an attention adds to its scores, (H, P + N, P + N)."""

    @abstractmethod
    def _run_kept(self, block: Any, tokens: Tensor, bias: Tensor | None) -> Tensor:
        """Run the block with this bias (B, H, T, T) in place of its own."""

    @property
    def num_passing(self) -> int:
        """Includes each image's bias in a masked view."""
        first: Any = self.blocks[0]
        return super().num_passing + int(first.attn.num_heads) * self.num_tokens**2

    def _begin(self, embedded: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[_Place]]:
        tokens, model = embedded, self.module
        if model.cls_token is not None:
            tokens = torch.cat((model.cls_token.expand(len(tokens), -1, -1), tokens), dim=1)
        if getattr(model, "pos_embed", None) is not None:
            tokens = tokens + model.pos_embed
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        return tokens, [_Place(self._shared_bias(), kept)] * len(self.blocks)

    def _run(self, block: Any, tokens: Tensor, place: _Place) -> Tensor:
        if place.kept is None:
            return block(tokens, **{self.shared_argument: place.shared})
        bias = self._bias(block.attn, place.shared)
        if bias is not None:
            bias = gather_bias(bias, place.kept, self.num_prefix_tokens)
        return self._run_kept(block, tokens, bias)

    def _class_attention(self, tokens: Tensor, place: _Place) -> Tensor:
        last: Any = self.blocks[-1]
        bias = self._bias(last.attn, place.shared)
        return class_attention(last, tokens, bias=None if bias is None else bias.unsqueeze(0))


class BEiT(_BiasedViT):
    """A timm Beit, with a bias per block, a shared one, both or none."""

    architecture = Beit
    shared_argument = "shared_rel_pos_bias"
    kinds: ClassVar[Mapping[str, str]] = {"BEiT and BEiT v2 (relative position bias)": "beit_base_patch16_224"}

    def _shared_bias(self) -> Tensor | None:
        return None if self.module.rel_pos_bias is None else self.module.rel_pos_bias()

    def _bias(self, attn: Any, shared: Tensor | None) -> Tensor | None:
        if attn.relative_position_bias_table is None:
            return shared
        own: Tensor = attn._get_rel_pos_bias().squeeze(0)
        return own if shared is None else own + shared

    def _run_kept(self, block: Any, tokens: Tensor, bias: Tensor | None) -> Tensor:
        mixed = _attend(block.attn, block.norm1(tokens), bias)
        tokens = tokens + (mixed if block.gamma_1 is None else block.gamma_1 * mixed)
        hidden = block.mlp(block.norm2(tokens))
        return tokens + (hidden if block.gamma_2 is None else block.gamma_2 * hidden)


class RelativeViT(_BiasedViT):
    """A timm VisionTransformerRelPos, with a bias from a table or a small MLP, per block or shared."""

    architecture = VisionTransformerRelPos
    shared_argument = "shared_rel_pos"
    kinds: ClassVar[Mapping[str, str]] = {
        "ViT with a relative position bias, average pooling": "vit_relpos_base_patch16_224",
        "ViT with a relative position bias and a class token": "vit_relpos_base_patch16_cls_224",
    }

    def _shared_bias(self) -> Tensor | None:
        shared = self.module.shared_rel_pos
        return None if shared is None else shared.get_bias()

    def _bias(self, attn: Any, shared: Tensor | None) -> Tensor | None:
        bias = shared if attn.rel_pos is None else attn.rel_pos.get_bias()
        return None if bias is None else bias.squeeze(0)

    def _run_kept(self, block: Any, tokens: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(block, RelPosBlock):
            tokens = tokens + block.ls1(_attend(block.attn, block.norm1(tokens), bias))
            return tokens + block.ls2(block.mlp(block.norm2(tokens)))
        tokens = tokens + block.norm1(_attend(block.attn, tokens, bias))
        after = tokens + block.norm2(block.mlp(tokens))
        return after


def gather_bias(bias: Tensor, kept: Tensor, num_prefix_tokens: int) -> Tensor:
    """Select the rows and columns (B, H, P + K, P + K) of a bias (H, P + N, P + N) for the patches kept (B, K);
    P <= 1.
    """
    tokens = F.pad(kept + num_prefix_tokens, (num_prefix_tokens, 0))
    return bias[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)


def _attend(attn: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute timm's attention on tokens (B, T, D) with this bias in place of its own, which is for all tokens."""
    q, k, v = F.linear(x, attn.qkv.weight, qkv_bias(attn)).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attn.proj(mixed.transpose(1, 2).flatten(2))
