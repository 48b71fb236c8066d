"""Random augmentations of tensors, drawn from a generator whose state can be saved.

Pixels are float32 in [0, 1]: what comes in preprocessed is brought back to them and normalised again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from remtta.methods.randomness import integer, spawn, uniform
from remtta.models import preprocessing_of

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

_BILINEAR = InterpolationMode.BILINEAR


class PixelSpace:
    """The way from a model's preprocessed space to pixels in [0, 1] and back.

    Args:
        model: A timm model; mean and deviation are those of its own config.
    """

    def __init__(self, model: nn.Module) -> None:
        preprocessing = preprocessing_of(model)
        self._mean = torch.tensor(preprocessing.mean).view(-1, 1, 1)
        self._std = torch.tensor(preprocessing.std).view(-1, 1, 1)

    def augment(self, images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
        """Apply an augmentation of pixels to preprocessed images (..., 3, H, W)."""
        pixels = augmentation(self.to_pixels(images), generator)
        return (pixels - self._mean.to(images.device)) / self._std.to(images.device)

    def to_pixels(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] of preprocessed images (..., 3, H, W)."""
        return (images * self._std.to(images.device) + self._mean.to(images.device)).clamp(0, 1)


@dataclass(frozen=True)
class _Ranges:
    """How far each change may go; factors around 1 unless said otherwise."""

    brightness: float
    contrast: float
    saturation: float
    hue: float  # around 0, as a share of the colour circle
    gamma: float
    degrees: float
    scale: float
    blur: float  # largest deviation, in pixels


_STRONG = _Ranges(0.4, 0.3, 0.5, 0.06, 0.3, 15, 0.1, 0.5)
_SOFT = _Ranges(0.2, 0.15, 0.25, 0.03, 0.15, 8, 0.05, 0.25)


def jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """CoTTA's augmentation: colours, a small affine map, blur, flip and noise.

    One set of numbers is drawn for all images; the noise is each image's own.
    Brightness 0.6-1.4, contrast and gamma 0.7-1.3, saturation 0.5-1.5 and hue
    within 0.06, in random order; rotation within 15 degrees, shift within
    1/16 of the padded image, scale 0.9-1.1; Gaussian blur over 5 pixels with a
    deviation of 0.001-0.5; a flip every second time; noise of deviation 0.005.
    Order and ranges were not compared with official code.

    Args:
        pixels: Shape (B, 3, H, W), in [0, 1].
        generator: Where the numbers come from.

    Returns:
        The same shape, in [0, 1].

    Source: Continual Test-Time Domain Adaptation, arXiv:2203.13591.
    """
    return _jitter(pixels, generator, _STRONG)


def soft_jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """`jitter` with half the ranges, for methods that learn from the augmented view."""
    return _jitter(pixels, generator, _SOFT)


def _jitter(pixels: Tensor, generator: torch.Generator, ranges: _Ranges) -> Tensor:
    height, width = pixels.shape[-2:]
    factors: list[tuple[Callable[[Tensor, float], Tensor], float, float]] = [
        (T.adjust_brightness, 1.0, ranges.brightness),
        (T.adjust_contrast, 1.0, ranges.contrast),
        (T.adjust_saturation, 1.0, ranges.saturation),
        (T.adjust_hue, 0.0, ranges.hue),
        (T.adjust_gamma, 1.0, ranges.gamma),
    ]
    for number in torch.randperm(len(factors), generator=generator).tolist():
        adjust, middle, reach = factors[number]
        pixels = adjust(pixels, uniform(generator, middle - reach, middle + reach))
    pixels = T.pad(pixels, [width // 2, height // 2], padding_mode="edge")  # so that no black corner turns in
    pixels = T.affine(
        pixels,
        angle=uniform(generator, -ranges.degrees, ranges.degrees),
        translate=[uniform(generator, -1, 1) * size / 16 for size in (pixels.shape[-1], pixels.shape[-2])],
        scale=uniform(generator, 1 - ranges.scale, 1 + ranges.scale),
        shear=[0.0, 0.0],
        interpolation=_BILINEAR,
    )
    sigma = uniform(generator, 0.001, ranges.blur)
    pixels = T.center_crop(T.gaussian_blur(pixels, kernel_size=[5, 5], sigma=[sigma, sigma]), [height, width])
    if integer(generator, 0, 1):
        pixels = T.horizontal_flip(pixels)
    noise = torch.randn(pixels.shape, generator=spawn(generator, pixels.device), device=pixels.device)
    return (pixels + 0.005 * noise).clamp(0, 1)
