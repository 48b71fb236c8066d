"""Noise: Gaussian, shot, impulse and speckle, drawn independently for every value of every channel.

Every corruption in this package takes a float32 image of shape (H, W, 3) in [0, 1], a random generator, the image's
size relative to the reference size (`scale`), and its own parameters. It leaves the input unchanged and may return
values outside [0, 1], which are clipped afterwards. Source: Hendrycks and Dietterich, 2019.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
"""float32 throughout."""


def gaussian_noise(image: Array, rng: np.random.Generator, scale: float, *, std: float) -> Array:
    """Add Gaussian noise, like a sensor in low light."""
    return image + np.float32(std) * rng.standard_normal(image.shape, dtype=np.float32)


def shot_noise(image: Array, rng: np.random.Generator, scale: float, *, photons: float) -> Array:
    """Draw photon counts from a Poisson distribution; a white pixel gets `photons` on average."""
    return (rng.poisson(image * photons) / photons).astype(np.float32)


def impulse_noise(image: Array, rng: np.random.Generator, scale: float, *, share: float) -> Array:
    """Add salt-and-pepper noise: set a share of the values to 1 or 0, half of them each."""
    draw = rng.random(image.shape, dtype=np.float32)
    noisy = np.where(draw < share, np.float32(1), image)
    noisy[draw < share / 2] = 0
    return noisy


def speckle_noise(image: Array, rng: np.random.Generator, scale: float, *, std: float) -> Array:
    """Add Gaussian noise proportional to the value."""
    return image * (1 + np.float32(std) * rng.standard_normal(image.shape, dtype=np.float32))
