"""Random augmentations of tensors, drawn from a generator whose state can be saved.

Pixels are float32 in [0, 1]: what comes in preprocessed is brought back to them and normalised again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from remtta.methods.randomness import integer, spawn, uniform
from remtta.models.preprocessing import preprocessing_of

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

_BILINEAR = InterpolationMode.BILINEAR


class PixelSpace:
    """The way from a timm model's preprocessed space, by its own config, to pixels in [0, 1] and back."""

    def __init__(self, model: nn.Module) -> None:
        preprocessing = preprocessing_of(model)
        self._mean = torch.tensor(preprocessing.mean).view(-1, 1, 1)
        self._std = torch.tensor(preprocessing.std).view(-1, 1, 1)

    def augment(self, images: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
        """Apply an augmentation of pixels to preprocessed images (..., 3, H, W)."""
        return self.normalise(augmentation(self.to_pixels(images), generator))

    def to_pixels(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] of preprocessed images (..., 3, H, W)."""
        return (images * self._std.to(images.device) + self._mean.to(images.device)).clamp(0, 1)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Preprocessed images of pixels in [0, 1] (..., 3, H, W)."""
        return (pixels - self._mean.to(pixels.device)) / self._std.to(pixels.device)


def jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """CoTTA's augmentation of pixels (B, 3, H, W) in [0, 1]: colours, a small affine map, blur, flip and noise.

    One set of numbers is drawn for all images; the noise is each image's own.
    Brightness 0.6-1.4, contrast and gamma 0.7-1.3, saturation 0.5-1.5 and hue
    within 0.06, in random order; rotation within 15 degrees, shift by whole
    pixels within 1/16 of the padded image, scale 0.9-1.1; Gaussian blur over 5 pixels with a
    deviation of 0.001-0.5; a flip every second time; noise of deviation 0.005.

    Source: Continual Test-Time Domain Adaptation, arXiv:2203.13591.
    """
    height, width = pixels.shape[-2:]
    pixels = _moved(_recoloured(pixels, generator), generator, edges="edge")
    sigma = uniform(generator, 0.001, 0.5)
    pixels = T.gaussian_blur(pixels, kernel_size=[5, 5], sigma=[sigma, sigma])
    pixels = _flipped(T.center_crop(pixels, [height, width]), generator)
    noise = torch.randn(pixels.shape, generator=spawn(generator, pixels.device), device=pixels.device)
    return (pixels + 0.005 * noise).clamp(0, 1)


def clean_jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """`jitter` with neither blur nor noise, and mirrored edges: the view that ROID and CMF learn from."""
    height, width = pixels.shape[-2:]
    pixels = _moved(_recoloured(pixels, generator), generator, edges="reflect")
    return _flipped(T.center_crop(pixels, [height, width]), generator).clamp(0, 1)


def _recoloured(pixels: Tensor, generator: torch.Generator) -> Tensor:
    changes: list[tuple[Callable[[Tensor, float], Tensor], float, float]] = [
        (T.adjust_brightness, 0.6, 1.4),
        (T.adjust_contrast, 0.7, 1.3),
        (T.adjust_saturation, 0.5, 1.5),
        (T.adjust_hue, -0.06, 0.06),
        (T.adjust_gamma, 0.7, 1.3),
    ]
    for number in torch.randperm(len(changes), generator=generator).tolist():
        adjust, low, high = changes[number]
        pixels = adjust(pixels, uniform(generator, low, high))
    return pixels


def _moved(pixels: Tensor, generator: torch.Generator, edges: str) -> Tensor:
    """As by torchvision's RandomAffine, still with the half of a side of padding that hides black corners."""
    height, width = pixels.shape[-2:]
    pixels = T.pad(pixels, [width // 2, height // 2], padding_mode=edges)
    moved: Tensor = T.affine(
        pixels,
        angle=uniform(generator, -15, 15),
        translate=[round(uniform(generator, -1, 1) * size / 16) for size in (pixels.shape[-1], pixels.shape[-2])],
        scale=uniform(generator, 0.9, 1.1),
        shear=[0.0, 0.0],
        interpolation=_BILINEAR,
    )
    return moved


def _flipped(pixels: Tensor, generator: torch.Generator) -> Tensor:
    return pixels.flip(-1) if integer(generator, 0, 1) else pixels
