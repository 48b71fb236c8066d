"""AugMix (Hendrycks et al., ICLR 2020), on tensors and drawn from a generator whose state can be saved."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from remtta.methods.randomness import integer, uniform

Colour = tuple[float, float, float]
_BLACK: Colour = (0.0, 0.0, 0.0)


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
        interpolation=InterpolationMode.BILINEAR,
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
