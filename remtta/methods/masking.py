"""From scores to the patch tokens that a masked view keeps, and how that looks."""

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


def keep_indices(scores: Tensor, mask_ratio: float) -> Tensor:
    """Return the patch tokens that a masked view keeps, those of the lowest scores (B, N): ascending positions (B, K).

    The paper's score is the attention of the class token: what it attends to
    most is the object, and that is what its explicit mask chaining hides. A
    larger ratio hides what a smaller one does, and more.

    Raises:
        ValueError: If the ratio leaves no token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, section 3.2.
    """
    kept = num_kept(scores.shape[1], mask_ratio)
    indices = scores.topk(kept, dim=1, largest=False, sorted=False).indices
    return indices.sort(dim=1).values


def random_scores(batch: int, num_patches: int, generator: torch.Generator) -> Tensor:
    """Return scores (B, N) on the CPU that hide patch tokens in a random order, another for each image.

    They are drawn image by image, so that the parts of a batch get what the whole of it would.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Effect of Masking Strategy".
    """
    return torch.stack([torch.randperm(num_patches, generator=generator) for _ in range(batch)])
