"""Pixels of preprocessed images, shuffled patches, and random views. Imports no torchvision, which takes seconds."""

from __future__ import annotations

import math
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


def patch_grid(image_size: Sequence[int], patch_size: Sequence[int]) -> int:
    """Return the number of patches along a side into which `shuffle_patches` is to cut images, at least 2."""
    return max(2, min(side // of for side, of in zip(image_size, patch_size, strict=True)))


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


def random_view(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random crop of an image (3, H, W), resized to its size and flipped with probability 1/2."""
    return flipped(_random_crop(pixels, generator), generator)


def flipped(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return an image, mirrored with probability 1/2."""
    return pixels.flip(-1) if integer(generator, 0, 1) else pixels


def _random_crop(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random crop of an image, resized to the image's size."""
    from torchvision.transforms.v2 import functional as T

    height, width = pixels.shape[-2:]
    return T.resized_crop(pixels, *random_box(height, width, generator), [height, width], antialias=True)


def random_box(height: int, width: int, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random crop of 8-100 % of an image's area with an aspect ratio of
    3/4-4/3; of the whole image if ten attempts do not fit into it.
    """
    for _ in range(10):
        area = height * width * uniform(generator, 0.08, 1)
        ratio = math.exp(uniform(generator, math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < high <= height and 0 < wide <= width:
            return integer(generator, 0, height - high), integer(generator, 0, width - wide), high, wide
    return 0, 0, height, width


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    """Return a number from a uniform distribution over [low, high)."""
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=generator))


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """Return a whole number from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))
