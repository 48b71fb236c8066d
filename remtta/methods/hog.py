"""Histograms of oriented gradients (Dalal and Triggs, CVPR 2005), patch by patch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_BINS = 9
_LARGEST_CELL = 8  # pixels


def hog_patches(pixels: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """What each patch of a ViT would have to reconstruct.

    Gradients of each colour by Sobel's filters vote with their length for one
    of 9 directions without sign, in cells of the most pixels up to 8 that
    divide the patch; every cell's histogram has unit length (0 where flat).

    Args:
        pixels: Shape (B, 3, H, W), H and W multiples of the patch's.
        patch_size: Height and width, in pixels.

    Returns:
        Shape (B, N, hog_size(patch_size)), patches row by row.
    """
    x = F.pad(pixels, (1, 1, 1, 1), mode="reflect")
    across, down = x[..., 2:] - x[..., :-2], x[..., 2:, :] - x[..., :-2, :]
    dx = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    dy = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    direction = (torch.atan2(dx, dy) / math.pi * NUM_BINS).floor().long() % NUM_BINS
    length = (dx.square() + dy.square()).sqrt()
    votes = torch.zeros(*pixels.shape[:2], NUM_BINS, *pixels.shape[2:], device=pixels.device)
    votes.scatter_(2, direction.unsqueeze(2), length.unsqueeze(2))
    cell = _cell(patch_size)
    pooled = F.avg_pool2d(votes.flatten(1, 2), cell)
    histograms = F.normalize(pooled.unflatten(1, (-1, NUM_BINS)), dim=2).flatten(1, 2)
    per_patch = (patch_size[0] // cell[0], patch_size[1] // cell[1])
    return F.unfold(histograms, per_patch, stride=per_patch).transpose(1, 2)


def hog_size(patch_size: tuple[int, int]) -> int:
    """Numbers per patch: 3 colours, 9 directions, and the cells of a patch."""
    cell = _cell(patch_size)
    return 3 * NUM_BINS * (patch_size[0] // cell[0]) * (patch_size[1] // cell[1])


def _cell(patch_size: tuple[int, int]) -> tuple[int, int]:
    height, width = (max(size for size in range(1, _LARGEST_CELL + 1) if side % size == 0) for side in patch_size)
    return height, width
