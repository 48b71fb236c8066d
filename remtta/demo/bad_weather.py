"""The conditions of the demo's camera, none of which its model was trained on (examples/train_demo_model.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFilter

Condition = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def _eight_bits(pixels: np.ndarray) -> np.ndarray:
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def _noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a sensor at high gain with Gaussian noise."""
    return _eight_bits(image / 255 + rng.normal(0, 0.33, image.shape))


def _blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a lens out of focus."""
    radius = float(rng.uniform(0.9, 1.4))
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))


def _fog(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add a bright veil of uneven density."""
    size = image.shape[0]
    coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
    density = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)) / 255
    veil = (0.35 + 0.2 * density)[..., None]
    return _eight_bits(image / 255 * (1 - veil) + 0.85 * veil)


def _dusk(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Darken with a bluish tint, and add sensor noise."""
    light = rng.uniform(0.36, 0.5) * np.array([0.8, 0.9, 1.2])
    return _eight_bits(image / 255 * light + rng.normal(0, 0.03, image.shape))


def _glare(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a low sun: overexposure and scattered light."""
    strength = rng.uniform(0.75, 1.0)
    return _eight_bits(image / 255 * (1 + strength) + 0.3 * strength)


CONDITIONS: dict[str, Condition] = {
    "clear": lambda image, rng: image,
    "noise": _noise,
    "blur": _blur,
    "fog": _fog,
    "dusk": _dusk,
    "glare": _glare,
}
"""The conditions of the demo's drive, in order."""
