"""Select the patch tokens that a masked view keeps, from scores."""

from __future__ import annotations

import torch
from torch import Tensor


def num_kept(num_patches: int, mask_ratio: float) -> int:
    """Return the number of `num_patches` tokens kept at a mask ratio: int(N * (1 - ratio)).

    Raises:
        ValueError: If none would be kept.
    """
    kept = int(num_patches * (1 - mask_ratio))
    if kept < 1:
        raise ValueError(f"mask ratio {mask_ratio:g} leaves none of {num_patches} patch tokens; choose a smaller one")
    return kept


def keep_indices(scores: Tensor, mask_ratio: float) -> Tensor:
    """Return the indices (B, K) of the patch tokens that a masked view keeps: those of lowest scores (B, N), ascending.

    The paper's score is the attention of the class token: it attends most to the object, which is what explicit mask
    chaining hides. A larger ratio hides a superset of what a smaller one hides.

    Raises:
        ValueError: If the ratio leaves no token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, section 3.2.
    """
    kept = num_kept(scores.shape[1], mask_ratio)
    indices = scores.topk(kept, dim=1, largest=False, sorted=False).indices
    return indices.sort(dim=1).values


def random_scores(batch: int, num_patches: int, generator: torch.Generator) -> Tensor:
    """Return scores (B, N) on the CPU that hide patch tokens in a random order, independently per image.

    They are drawn image by image, so that splitting a batch does not change them.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Effect of Masking Strategy".
    """
    return torch.stack([torch.randperm(num_patches, generator=generator) for _ in range(batch)])
