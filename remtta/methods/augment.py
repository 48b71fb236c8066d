"""Random views of images that keep their class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_BRIGHTNESS = (0.8, 1.2)
_CONTRAST = (0.85, 1.15)
_SATURATION = (0.75, 1.25)
_GAMMA = (0.85, 1.15)
_DEGREES = (-8.0, 8.0)
_SHIFT = (-1 / 16, 1 / 16)  # of the side
_SCALE = (0.95, 1.05)
_LUMA = (0.299, 0.587, 0.114)


def augment(images: Tensor, mean: Tensor, std: Tensor, generator: torch.Generator) -> Tensor:
    """Change colours a little, then rotate, shift, scale and perhaps mirror; each image in its own way.

    The kinds of change are those of the literature's soft test-time views but
    for blur and noise, which are too weak there to matter.

    Args:
        images: Shape (B, 3, H, W), normalised by mean and std.
        mean: Shape (3, 1, 1), for pixel values in [0, 1].
        std: Shape (3, 1, 1), for pixel values in [0, 1].
        generator: Random numbers, on the CPU.

    Returns:
        Shape (B, 3, H, W), normalised.
    """
    draws = torch.rand(len(images), 9, generator=generator).to(images.device)
    pixels = _jitter((images * std + mean).clamp(0, 1), draws[:, :4])
    return (_move(pixels, draws[:, 4:]) - mean) / std


def _jitter(pixels: Tensor, draws: Tensor) -> Tensor:
    """Brightness, contrast, saturation and gamma by draws (B, 4)."""
    brightness, contrast, saturation, gamma = (
        _between(draw, limits).view(-1, 1, 1, 1)
        for draw, limits in zip(draws.unbind(1), (_BRIGHTNESS, _CONTRAST, _SATURATION, _GAMMA), strict=True)
    )
    luma = pixels.new_tensor(_LUMA).view(3, 1, 1)
    pixels = (pixels * brightness).clamp(0, 1)
    level = (pixels * luma).sum(1, keepdim=True).mean((2, 3), keepdim=True)
    pixels = (level + contrast * (pixels - level)).clamp(0, 1)
    grey = (pixels * luma).sum(1, keepdim=True)
    return (grey + saturation * (pixels - grey)).clamp(0, 1).pow(gamma)


def _move(pixels: Tensor, draws: Tensor) -> Tensor:
    """Rotation, shifts, scale and mirroring by draws (B, 5); what comes in from outside is reflected."""
    height, width = pixels.shape[-2:]
    angle = torch.deg2rad(_between(draws[:, 0], _DEGREES))
    scale = _between(draws[:, 3], _SCALE)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    mirror = torch.where(draws[:, 4] < 0.5, 1.0, -1.0)
    across = torch.stack([mirror * cos, -mirror * sin * height / width, 2 * _between(draws[:, 1], _SHIFT)], dim=1)
    down = torch.stack([sin * width / height, cos, 2 * _between(draws[:, 2], _SHIFT)], dim=1)
    grid = F.affine_grid(torch.stack([across, down], dim=1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, padding_mode="reflection", align_corners=False)


def _between(draws: Tensor, limits: tuple[float, float]) -> Tensor:
    low, high = limits
    return low + (high - low) * draws
