"""Random augmentations of tensors, drawn from a generator with a state that can be saved.

They work on float32 pixels in [0, 1]: preprocessed images are converted to pixels and normalised again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as T

from remtta.methods.pixels import Augmentation, flipped, integer, random_view, uniform

_BILINEAR = InterpolationMode.BILINEAR
_BORDER = [128 / 255, 0.0, 0.0]  # beyond an image's edges in AugMix: what Pillow makes of MEMO's official 128


def spawn(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return a generator on a device, seeded by a draw from another; only the latter's state needs to be saved."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return torch.Generator(device).manual_seed(seed)


def without_low_frequencies(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Remove a random share of the low frequencies, the mean among them, of every channel of images (B, 3, H, W).

    Those are a fifth of each axis of the spectrum. Opposite ones go together, so that images stay real.

    Source: SPA, arXiv:2504.08010, with the ranges of its official code.
    """
    (height, width), kept = images.shape[-2:], torch.ones(images.shape, dtype=torch.bool)
    high, wide = max(1, height // 5), max(1, width // 5)
    top, left = height - (height - high) // 2 - high, width - (width - wide) // 2 - wide
    drawn = torch.rand(images.shape, generator=generator, dtype=torch.float32) >= share
    kept[..., top : top + high, left : left + wide] = drawn[..., top : top + high, left : left + wide]
    paired = kept[..., 1 - height % 2 :, 1 - width % 2 :]  # without the frequencies that have no opposite
    row, column = paired.shape[-2] // 2, paired.shape[-1] // 2
    paired[..., row + 1 :, :] = True  # the upper half decides
    paired[..., row, :column] = True
    paired &= paired.flip(-2, -1)
    mask = torch.fft.ifftshift(kept, (-2, -1)).to(images.device)
    return torch.fft.ifft2(torch.fft.fft2(images.float()) * mask).real


def jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Apply CoTTA's augmentation to pixels (B, 3, H, W) in [0, 1]: colours, a small affine map, blur, flip and noise.

    All images share one set of random numbers, except for the noise. Brightness 0.6-1.4, contrast and gamma 0.7-1.3,
    saturation 0.5-1.5 and hue within 0.06, in random order; rotation within 15 degrees, shift by whole pixels within
    1/16 of the padded image, scale 0.9-1.1; Gaussian blur over 5 pixels with a standard deviation of 0.001-0.5; a flip
    with probability 1/2; noise with standard deviation 0.005.

    Source: Continual Test-Time Domain Adaptation, arXiv:2203.13591.
    """
    size = list(pixels.shape[-2:])
    pixels = _moved(_recoloured(pixels, generator), generator, edges="edge")
    sigma = uniform(generator, 0.001, 0.5)
    pixels = T.gaussian_blur(pixels, kernel_size=[5, 5], sigma=[sigma, sigma])
    pixels = flipped(T.center_crop(pixels, size), generator)
    drawn_by = spawn(generator, pixels.device)
    noise = torch.randn(pixels.shape, generator=drawn_by, device=pixels.device, dtype=pixels.dtype)
    return (pixels + 0.005 * noise).clamp(0, 1)


def clean_jitter(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Apply `jitter` without blur and noise, and with mirrored edges: the augmented view of ROID and CMF."""
    height, width = pixels.shape[-2:]
    pixels = _moved(_recoloured(pixels, generator), generator, edges="reflect")
    return flipped(T.center_crop(pixels, [height, width]), generator).clamp(0, 1)


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
    """Transform like torchvision's RandomAffine, keeping the padding of half a side that hides black corners."""
    height, width = pixels.shape[-2:]
    pixels = T.pad(pixels, [width // 2, height // 2], padding_mode=edges)
    return T.affine(
        pixels,
        angle=uniform(generator, -15, 15),
        translate=[round(uniform(generator, -1, 1) * size / 16) for size in (pixels.shape[-1], pixels.shape[-2])],
        scale=uniform(generator, 0.9, 1.1),
        shear=[0.0, 0.0],
        interpolation=_BILINEAR,
    )


def augmix(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Apply AugMix at severity 1 to a random crop and flip of an image (3, H, W) in [0, 1].

    Three chains of 1 to 3 operations are averaged with weights from a flat Dirichlet distribution, and the result is
    mixed with the crop by a uniform weight in [0, 1).

    Source: AugMix, arXiv:1912.02781; the operations and their ranges are those of its appendix.
    """
    crop = random_view(pixels, generator)
    weights = -torch.rand(3, dtype=torch.float64, generator=generator).log()
    mixed = torch.zeros_like(crop)
    for weight in (weights / weights.sum()).tolist():
        chain = crop
        for _ in range(integer(generator, 1, 3)):
            chain = OPERATIONS[integer(generator, 0, len(OPERATIONS) - 1)](chain, generator)
        mixed += weight * chain
    return torch.lerp(crop, mixed, uniform(generator, 0, 1))


def _level(generator: torch.Generator) -> float:
    """Return the strength of an operation as a fraction of its range, at severity 1."""
    return uniform(generator, 0.1, 1) / 10


def _signed(generator: torch.Generator, value: float) -> float:
    return value if integer(generator, 0, 1) else -value


def affine(
    pixels: Tensor, angle: float = 0.0, shift: tuple[float, float] = (0.0, 0.0), shear: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Rotate pixels (..., 3, H, W) clockwise by degrees, or move them by pixels, or shear them by factors."""
    degrees = [math.degrees(math.atan(factor)) for factor in shear]
    corner = [0.0, 0.0] if any(shear) else None  # fixed point: the corner for a shear, the centre for a rotation
    return T.affine(pixels, angle, list(shift), 1.0, degrees, interpolation=_BILINEAR, fill=_BORDER, center=corner)


def _shift(pixels: Tensor, generator: torch.Generator, axis: int) -> Tensor:
    size = pixels.shape[-1 - axis]
    amount = _signed(generator, int(_level(generator) * size / 3))
    return affine(pixels, shift=(0.0, amount) if axis else (amount, 0.0))


def _shear(pixels: Tensor, generator: torch.Generator, axis: int) -> Tensor:
    amount = _signed(generator, 0.3 * _level(generator))
    return affine(pixels, shear=(0.0, amount) if axis else (amount, 0.0))


OPERATIONS: tuple[Augmentation, ...] = (
    lambda pixels, generator: T.autocontrast(pixels),
    lambda pixels, generator: T.equalize(pixels),
    lambda pixels, generator: T.posterize(pixels, 4 - int(4 * _level(generator))),
    lambda pixels, generator: T.solarize(pixels, 1 - int(256 * _level(generator)) / 256),
    lambda pixels, generator: affine(pixels, angle=_signed(generator, int(30 * _level(generator)))),
    lambda pixels, generator: _shear(pixels, generator, 0),
    lambda pixels, generator: _shear(pixels, generator, 1),
    lambda pixels, generator: _shift(pixels, generator, 0),
    lambda pixels, generator: _shift(pixels, generator, 1),
)
"""The operations of AugMix, of random strength."""
