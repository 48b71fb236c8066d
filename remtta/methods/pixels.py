"""Pixels of preprocessed images, and images with shuffled patches. Imports no torchvision, which takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

Augmentation = Callable[[Tensor, torch.Generator], Tensor]


class PixelSpace:
    """Converts between images of this mean and standard deviation per channel and pixels in [0, 1]."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (mean, std))

    def augment(self, images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
        """Apply an augmentation of pixels to preprocessed images (..., 3, H, W)."""
        return self.normalise(augmentation(self.to_pixels(images), generator))

    def to_pixels(self, images: Tensor) -> Tensor:
        """Convert preprocessed images (..., 3, H, W) to pixels in [0, 1]."""
        return (images * self._std.to(images.device) + self._mean.to(images.device)).clamp(0, 1)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Convert pixels in [0, 1] (..., 3, H, W) to preprocessed images."""
        return (pixels - self._mean.to(pixels.device)) / self._std.to(pixels.device)


def shuffle_patches(images: Tensor, grid: int, generator: torch.Generator) -> Tensor:
    """Cut each image (B, 3, H, W) into grid x grid patches, and shuffle them, independently per image.

    If the grid does not divide the size, the image is resized to the next smaller size that it divides, and back.
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
    return rows.flatten(4, 5).flatten(2, 3)
