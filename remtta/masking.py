"""From attention to the patch tokens that a masked view keeps."""

from __future__ import annotations

import torch
from torch import Tensor


def num_kept(num_patches: int, mask_ratio: float) -> int:
    """How many of `num_patches` tokens stay at a mask ratio: int(N * (1 - ratio)).

    Raises:
        ValueError: If the ratio leaves none.
    """
    kept = int(num_patches * (1 - mask_ratio))
    if kept < 1:
        raise ValueError(f"mask ratio {mask_ratio:g} leaves none of {num_patches} patch tokens; choose a smaller one")
    return kept


def keep_indices(cls_attn: Tensor, mask_ratio: float) -> Tensor:
    """The patch tokens a masked view keeps: the ones attended least.

    What the class token attends to most is the object, and that is what the
    explicit mask chaining of the paper hides.

    Args:
        cls_attn: Shape (B, N), attention of the class token to N patch tokens.
        mask_ratio: Fraction of patch tokens to leave out, in [0, 1).

    Returns:
        Shape (B, K) with K = int(N * (1 - mask_ratio)), ascending positions.

    Raises:
        ValueError: If the ratio leaves no token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, section 3.2.
    """
    kept = num_kept(cls_attn.shape[1], mask_ratio)
    indices = cls_attn.topk(kept, dim=1, largest=False, sorted=False).indices
    return indices.sort(dim=1).values


def gather_patches(tokens: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Keep all prefix tokens and the chosen patch tokens.

    Args:
        tokens: Shape (B, P + N, D): P prefix tokens (class, register,
            distillation), then N patch tokens.
        indices: Shape (B, K), positions among the patch tokens.
        num_prefix_tokens: P.

    Returns:
        Shape (B, P + K, D).
    """
    patch_tokens = tokens[:, num_prefix_tokens:]
    chosen = patch_tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :num_prefix_tokens], chosen], dim=1)
