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
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from remtta.backbones.tokens import Transformer, gather_patches


class _Place(NamedTuple):
    """The bias shared by all blocks, if any, in the form of timm's blocks; and the patches kept (B, K), or None."""

    shared: Tensor | None
    kept: Tensor | None


class _BiasedViT(Transformer):
    """At most a class token before the patches, and a bias (H, P + N, P + N) per block, shared, both or none."""

    @abstractmethod
    def _shared_bias(self) -> Tensor | None:
        """Return the bias shared by all blocks, in the form they take."""

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
            return block(tokens, place.shared)
        with _KeptBias(place.kept, self.num_prefix_tokens):
            return block.forward(tokens, place.shared)  # not compiled, which would bypass the context


class BEiT(_BiasedViT):
    """A timm Beit."""

    architecture = Beit
    kinds: ClassVar[Mapping[str, str]] = {"BEiT and BEiT v2 (relative position bias)": "beit_base_patch16_224"}

    def _shared_bias(self) -> Tensor | None:
        return None if self.module.rel_pos_bias is None else self.module.rel_pos_bias()


class RelativeViT(_BiasedViT):
    """A timm VisionTransformerRelPos, with a bias from a table or a small MLP."""

    architecture = VisionTransformerRelPos
    kinds: ClassVar[Mapping[str, str]] = {
        "ViT with a relative position bias, average pooling": "vit_relpos_base_patch16_224",
        "ViT with a relative position bias and a class token": "vit_relpos_base_patch16_cls_224",
    }

    def _shared_bias(self) -> Tensor | None:
        shared = self.module.shared_rel_pos
        return None if shared is None else shared.get_bias()


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
    """Select the rows and columns (B, H, P + K, P + K) of a bias (H, P + N, P + N) for the patches kept (B, K);
    P <= 1.
    """
    tokens = F.pad(kept + num_prefix_tokens, (num_prefix_tokens, 0))
    return bias[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)
