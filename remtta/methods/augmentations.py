"""Random augmentations of tensors, drawn from a generator whose state can be saved.

Pixels are float32 in [0, 1]: what comes in preprocessed is brought back to them and normalised again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

Augmentation = Callable[[Tensor, torch.Generator], Tensor]

Colour = tuple[float, float, float]
_BLACK: Colour = (0.0, 0.0, 0.0)
_BILINEAR = InterpolationMode.BILINEAR


def spawn(generator: torch.Generator, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator on a device, seeded by a draw from another; only the latter's state needs to be saved."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    """A number drawn evenly from [low, high)."""
    return low + (high - low) * float(torch.rand((), dtype=torch.float64, generator=generator))


def integer(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number drawn evenly from low to high, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


class PixelSpace:
    """The way from preprocessed images, of this mean and deviation per channel, to pixels in [0, 1] and back."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

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


def augmix(pixels: Tensor, generator: torch.Generator, border: Colour = _BLACK) -> Tensor:
    """AugMix at severity 1 of a random crop and flip of an image (3, H, W) in [0, 1].

    Three chains of 1 to 3 operations are averaged with weights from a flat
    Dirichlet, and the result and the crop with a weight that is even in
    [0, 1). Beyond the crop's edges lies the border's colour, in [0, 1].

    Source: AugMix, arXiv:1912.02781; the operations and their ranges are its appendix's.
    """
    crop = random_view(pixels, generator)
    weights = -torch.rand(3, dtype=torch.float64, generator=generator).log()
    mixed = torch.zeros_like(crop)
    for weight in (weights / weights.sum()).tolist():
        chain = crop
        for _ in range(integer(generator, 1, 3)):
            chain = _OPERATIONS[integer(generator, 0, len(_OPERATIONS) - 1)](chain, generator, border)
        mixed += weight * chain
    return torch.lerp(crop, mixed, uniform(generator, 0, 1))


def random_view(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of an image (3, H, W), back at its size, and every second time flipped."""
    crop = _random_crop(pixels, generator)
    return T.horizontal_flip(crop) if integer(generator, 0, 1) else crop


def _random_crop(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """A crop of 8-100 % of the area and a ratio of sides of 3/4-4/3, back at the size."""
    height, width = pixels.shape[-2:]
    for _ in range(10):
        area = height * width * uniform(generator, 0.08, 1)
        ratio = math.exp(uniform(generator, math.log(3 / 4), math.log(4 / 3)))
        high, wide = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < high <= height and 0 < wide <= width:
            top, left = integer(generator, 0, height - high), integer(generator, 0, width - wide)
            crop: Tensor = T.resized_crop(pixels, top, left, high, wide, [height, width], antialias=True)
            return crop
    return pixels


def _level(generator: torch.Generator) -> float:
    """How far an operation goes, in tenths of its range: severity 1."""
    return uniform(generator, 0.1, 1) / 10


def _signed(generator: torch.Generator, value: float) -> float:
    return value if integer(generator, 0, 1) else -value


def _affine(
    pixels: Tensor,
    border: Colour,
    angle: float = 0.0,
    shift: tuple[float, float] = (0.0, 0.0),
    shear: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    degrees = [math.degrees(math.atan(factor)) for factor in shear]
    corner = [0.0, 0.0] if any(shear) else None  # which a shear leaves in its place; a rotation, the centre
    moved: Tensor = T.affine(
        pixels,
        angle,
        list(shift),
        1.0,
        degrees,
        interpolation=_BILINEAR,
        fill=list(border),
        center=corner,
    )
    return moved


def _shift(pixels: Tensor, generator: torch.Generator, border: Colour, axis: int) -> Tensor:
    size = pixels.shape[-1 - axis]
    amount = _signed(generator, int(_level(generator) * size / 3))
    return _affine(pixels, border, shift=(0.0, amount) if axis else (amount, 0.0))


def _shear(pixels: Tensor, generator: torch.Generator, border: Colour, axis: int) -> Tensor:
    amount = _signed(generator, 0.3 * _level(generator))
    return _affine(pixels, border, shear=(0.0, amount) if axis else (amount, 0.0))


_OPERATIONS: tuple[Callable[[Tensor, torch.Generator, Colour], Tensor], ...] = (
    lambda pixels, generator, border: T.autocontrast(pixels),
    lambda pixels, generator, border: T.equalize(pixels),
    lambda pixels, generator, border: T.posterize(pixels, 4 - int(4 * _level(generator))),
    lambda pixels, generator, border: T.solarize(pixels, 1 - int(256 * _level(generator)) / 256),
    lambda pixels, generator, border: _affine(pixels, border, angle=_signed(generator, int(30 * _level(generator)))),
    lambda pixels, generator, border: _shear(pixels, generator, border, 0),
    lambda pixels, generator, border: _shear(pixels, generator, border, 1),
    lambda pixels, generator, border: _shift(pixels, generator, border, 0),
    lambda pixels, generator, border: _shift(pixels, generator, border, 1),
)
