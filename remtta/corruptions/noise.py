"""Noise: Gaussian, shot, impulse and speckle. Every value of every channel is drawn on its own.

Here and in the modules beside it, a corruption takes a float32 image of shape (H, W, 3) in [0, 1], the random
generator, the image's size relative to the parameters' own (`scale`), and its parameters. What it returns may lie
outside [0, 1]; it is clipped afterwards. The input is left as it is. Source: Hendrycks and Dietterich, 2019.
"""

from __future__ import annotations

import numpy as np

from remtta.corruptions.filters import Array


def gaussian_noise(image: Array, rng: np.random.Generator, scale: float, *, std: float) -> Array:
    """Add normal noise: a sensor in low light."""
    noisy: Array = image + np.float32(std) * rng.standard_normal(image.shape, dtype=np.float32)
    return noisy


def shot_noise(image: Array, rng: np.random.Generator, scale: float, *, photons: float) -> Array:
    """Count photons, of which a white pixel gets `photons` on average."""
    return (rng.poisson(image * photons) / photons).astype(np.float32)


def impulse_noise(image: Array, rng: np.random.Generator, scale: float, *, share: float) -> Array:
    """Salt and pepper: set a share of the values to 1 or 0, half of it each."""
    draw = rng.random(image.shape, dtype=np.float32)
    noisy = np.where(draw < share, np.float32(1), image)
    noisy[draw < share / 2] = 0
    return noisy


def speckle_noise(image: Array, rng: np.random.Generator, scale: float, *, std: float) -> Array:
    """Add normal noise in proportion to the value."""
    noisy: Array = image * (1 + np.float32(std) * rng.standard_normal(image.shape, dtype=np.float32))
    return noisy
