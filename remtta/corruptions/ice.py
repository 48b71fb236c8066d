"""Procedural ice textures, used in place of the benchmark's photographs of frost.

A bluish white on dark: a haze of uneven density, a network of ridges between crystals, and feathers that branch at
60 degrees as ice does. Each texture tiles seamlessly in both directions.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from remtta.corruptions.filters import Array, cv2

NUM_TEXTURES = 5
_DRAWN_FOR = 224  # pixels, short side of an image
_DRAWN_SIZE = 512

_SEED = 20190507  # of the textures; the caller's generator chooses among them and places the crop
_NUM_FEATHERS = 44
_SHADOW = np.array([0.05, 0.08, 0.13], dtype=np.float32)
_LIGHT = np.array([0.90, 0.97, 1.00], dtype=np.float32)


@lru_cache(maxsize=2 * NUM_TEXTURES)
def ice_texture(number: int, short_side: int) -> Array:
    """Return a texture (N, N, 3), RGB in [0, 1], by its number below NUM_TEXTURES.

    N is a little over twice the images' short side in pixels. The array is cached and read-only.
    """
    side = round(_DRAWN_SIZE * short_side / _DRAWN_FOR)
    texture: Array = cv2.resize(_drawn(number), (side, side), interpolation=cv2.INTER_AREA)
    texture.flags.writeable = False
    return texture


@lru_cache(maxsize=NUM_TEXTURES)
def _drawn(number: int) -> Array:
    rng = np.random.default_rng([_SEED, number])
    noise = _periodic_noise(rng, 2.2)
    low, high = np.quantile(noise, (0.02, 0.98))
    haze = ((noise - low) / (high - low)).clip(0, 1).astype(np.float32)
    ridges = sum(_ridges(rng, wavelength) * weight for wavelength, weight in ((48, 0.2), (20, 0.25), (9, 0.25)))
    feathers = _feathers(rng)
    height = 0.5 * haze**1.5 + 1.2 * haze * ridges + (0.35 + 0.7 * haze) * feathers
    sparkle = 0.04 * haze * rng.standard_normal(height.shape, dtype=np.float32)
    density = (height + sparkle).clip(0, 1)[..., None].astype(np.float32)
    return _SHADOW + density * (_LIGHT - _SHADOW)


def _periodic_noise(rng: np.random.Generator, slope: float, shortest: float = 2.0, longest: float = 400.0) -> Array:
    """Return noise with amplitude proportional to frequency**-slope, within a band of wavelengths in pixels."""
    spectrum = np.fft.rfft2(rng.standard_normal((_DRAWN_SIZE, _DRAWN_SIZE)))
    frequency = np.hypot(np.fft.fftfreq(_DRAWN_SIZE)[:, None], np.fft.rfftfreq(_DRAWN_SIZE))
    frequency[0, 0] = 1
    band = (frequency >= 1 / longest) & (frequency <= 1 / shortest)
    noise = np.fft.irfft2(spectrum * np.where(band, frequency**-slope, 0), (_DRAWN_SIZE, _DRAWN_SIZE))
    return (noise / noise.std()).astype(np.float32)


def _ridges(rng: np.random.Generator, wavelength: float) -> Array:
    """Return thin bright lines at the zero crossings of smooth noise, like borders between crystals."""
    noise = _periodic_noise(rng, 1.0, shortest=wavelength / 2, longest=2 * wavelength)
    return np.exp(-np.abs(noise) * 4).astype(np.float32)


def _feathers(rng: np.random.Generator) -> Array:
    tiles = np.zeros((_DRAWN_SIZE, _DRAWN_SIZE), dtype=np.float32)
    for _ in range(_NUM_FEATHERS):
        feather = _feather(rng, length=float(rng.uniform(40, 170)))
        top, left = rng.integers(_DRAWN_SIZE, size=2)
        tiles = np.maximum(tiles, np.roll(feather, (top, left), axis=(0, 1)))
    return tiles


def _feather(rng: np.random.Generator, length: float) -> Array:
    """Return one feather growing from the middle of the tile: a stem with two levels of branches."""
    tile = np.zeros((_DRAWN_SIZE, _DRAWN_SIZE), dtype=np.uint8)
    middle = _DRAWN_SIZE / 2
    _grow(tile, rng, middle, middle, float(rng.uniform(0, 2 * math.pi)), length, level=0)
    sharp = tile.astype(np.float32) / 255
    return 0.7 * sharp + 0.6 * cv2.GaussianBlur(sharp, (0, 0), 2.0)


def _grow(
    tile: np.ndarray, rng: np.random.Generator, x: float, y: float, heading: float, length: float, level: int
) -> None:
    """Draw a slightly bent stem in short steps, with branches on both sides."""
    bend = float(rng.normal(0, 0.012))
    step = (6.0, 4.0, 3.0)[level]
    num_steps = int(length / step)
    for number in range(num_steps):
        heading += bend + float(rng.normal(0, 0.04))
        next_x, next_y = x + step * math.cos(heading), y + step * math.sin(heading)
        light = (255, 215, 170)[level] * (1 - 0.5 * number / num_steps)
        ends = [(round(16 * a), round(16 * b)) for a, b in ((x, y), (next_x, next_y))]
        cv2.line(tile, *ends, int(light), 1, cv2.LINE_AA, 4)
        x, y = next_x, next_y
        if level < 2 and number:
            reach = (0.45, 0.4)[level] * length * (1 - number / num_steps) * float(rng.uniform(0.5, 1.1))
            for side in (-1, 1):
                turn = math.radians(60) + float(rng.normal(0, 0.08))
                _grow(tile, rng, x, y, heading + side * turn, reach, level + 1)
