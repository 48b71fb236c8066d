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
from torch.overrides import TorchFunctionMode

from remtta.backbones.tokens import Transformer, gather_patches

_Place = tuple[Tensor | None, Tensor | None]
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
        return tokens, [(shared, kept)] * len(self.blocks)

    def _run(self, block: Any, tokens: Tensor, place: _Place) -> Tensor:
        shared, kept = place
        if kept is None:
            return block(tokens, shared)
        with _KeptBias(kept, self.num_prefix_tokens):
            return block.forward(tokens, shared)  # not compiled, which would bypass the context


class _KeptBias(TorchFunctionMode):
    """Context in which attentions add the rows and columns of their bias that belong to the patches kept (B, K)."""

    def __init__(self, kept: Tensor, num_prefix_tokens: int) -> None:
        super().__init__()
        self._kept, self._num_prefix_tokens = kept, num_prefix_tokens

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and given["attn_mask"] is not None:
            given["attn_mask"] = gather_bias(given["attn_mask"].squeeze(0), self._kept, self._num_prefix_tokens)
        return func(*args, **given)


def gather_bias(bias: Tensor, kept: Tensor, num_prefix_tokens: int) -> Tensor:
    """Select rows and columns (B, H, P + K, P + K) of a bias (H, P + N, P + N) for the patches kept (B, K); P <= 1."""
    tokens = F.pad(kept + num_prefix_tokens, (num_prefix_tokens, 0))
    return bias[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)
