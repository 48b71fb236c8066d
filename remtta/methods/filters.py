"""Which images are worth learning from: shared by the methods that choose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def running_mean(mean: Tensor | None, probs: Tensor, momentum: float) -> Tensor:
    """The running mean (C,) of predicted probabilities after one more batch (B, C); the batch's own at first."""
    new = probs.mean(0)
    return new if mean is None else momentum * mean + (1 - momentum) * new


def cosines(mean_probs: Tensor, probs: Tensor) -> Tensor:
    """Cosine (B,) of each image's probabilities (B, C) with the running mean (C,)."""
    return F.cosine_similarity(mean_probs.unsqueeze(0), probs, dim=-1)


def shuffle_patches(images: Tensor, grid: int, generator: torch.Generator) -> Tensor:
    """Cut each image into grid x grid patches and lay them out in a random order.

    Args:
        images: Shape (B, 3, H, W); a size that the grid does not divide is
            resized to the next smaller one that it does, and back.
        grid: Patches in a row and in a column.
        generator: Random numbers, on the CPU; drawn image by image.

    Returns:
        Shape (B, 3, H, W), another order for each image.
    """
    height, width = images.shape[-2:]
    fitting = (height // grid * grid, width // grid * grid)
    if fitting != (height, width):
        resized = F.interpolate(images, fitting, mode="bilinear", antialias=True)
        mixed = shuffle_patches(resized, grid, generator)
        return F.interpolate(mixed, (height, width), mode="bilinear", antialias=True)
    orders = torch.stack([torch.randperm(grid * grid, generator=generator) for _ in images]).to(images.device)
    patches = images.unflatten(3, (grid, -1)).unflatten(2, (grid, -1))  # (B, 3, grid, h, grid, w)
    patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (B, grid * grid, 3, h, w)
    patches = patches[torch.arange(len(images), device=images.device).unsqueeze(1), orders]
    rows = patches.unflatten(1, (grid, grid)).permute(0, 3, 1, 4, 2, 5)  # (B, 3, grid, h, grid, w)
    shuffled: Tensor = rows.flatten(4, 5).flatten(2, 3)
    return shuffled
