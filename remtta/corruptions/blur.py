"""Blur: out of focus, behind frosted glass, in motion, while zooming, and Gaussian.

See `noise` for the signature of a corruption. Lengths in pixels are multiplied by `scale`.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from remtta.corruptions import filters
from remtta.corruptions.filters import Array, cv2

_WIDE_RADIUS = 8  # above this, the disk's edge is smoothed over two pixels per side instead of one
_LIST_UP_TO = 4_000_000  # pixels; a list swaps twice as fast as an array but takes ten times the memory


def defocus_blur(image: Array, rng: np.random.Generator, scale: float, *, radius: float, sigma: float) -> Array:
    """Put the lens out of focus: spread every point over a disk with a slightly smoothed edge."""
    edge = math.ceil((1 if radius <= _WIDE_RADIUS else 2) * scale)
    kernel = disk(radius * scale, sigma * scale, edge)
    return cv2.filter2D(image, -1, kernel, borderType=cv2.BORDER_REFLECT_101)


def disk(radius: float, sigma: float, edge: int) -> Array:
    """Return a disk that sums to 1, smoothed by a Gaussian of reach `edge` pixels; shape (N, N), N odd."""
    reach = int(radius) + edge
    steps = np.arange(-reach, reach + 1)
    inside = (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.float32)
    window = (2 * edge + 1, 2 * edge + 1)
    return cv2.GaussianBlur(inside / inside.sum(), window, sigma, borderType=cv2.BORDER_CONSTANT)


def glass_blur(
    image: Array, rng: np.random.Generator, scale: float, *, sigma: float, distance: float, passes: float
) -> Array:
    """Look through frosted glass: swap every pixel with one nearby, between two Gaussian blurs."""
    height, width = image.shape[:2]
    smooth = filters.gaussian(image, sigma * scale)
    order = shuffled_nearby(height, width, max(1, round(distance * scale)), int(passes), rng)
    shuffled = smooth.reshape(-1, 3)[order].reshape(image.shape)
    return filters.gaussian(shuffled, sigma * scale)


def shuffled_nearby(height: int, width: int, distance: int, passes: int, rng: np.random.Generator) -> np.ndarray:
    """Return the source position of each pixel after random swaps with pixels up to `distance` rows and columns away.

    Positions are flat, shape (H * W,), each once. A pass goes from the bottom right to the top left, so a pixel may be
    swapped several times, and carried further. Each swap therefore depends on earlier ones, so this is a plain loop
    over positions, which is fast enough.
    """
    positions = range(height * width)
    order = list(positions) if len(positions) <= _LIST_UP_TO else array("q", positions)
    for _ in range(passes):
        for row in reversed(range(height)):
            rows, columns = rng.integers(-distance, distance + 1, (2, width))
            partner_rows = (row + rows).clip(0, height - 1)
            partner_columns = (np.arange(width) + columns).clip(0, width - 1)
            partners = (partner_rows * width + partner_columns)[::-1].tolist()
            for here, there in zip(range((row + 1) * width - 1, row * width - 1, -1), partners, strict=True):
                order[here], order[there] = order[there], order[here]
    return np.asarray(order, dtype=np.int64)


def motion_blur(image: Array, rng: np.random.Generator, scale: float, *, radius: float, sigma: float) -> Array:
    """Move the camera while the shutter is open, at up to 45 degrees from the horizontal."""
    return filters.motion(image, radius * scale, sigma * scale, rng.uniform(-45, 45))


def zoom_blur(image: Array, rng: np.random.Generator, scale: float, *, zoom: float, step: float) -> Array:
    """Average the image with progressively zoomed centre crops, as if moving forward with the shutter open."""
    count = math.ceil(round((zoom - 1) / step, 6))  # zoom excluded; `round` absorbs floating-point error
    total = image.copy()
    for number in range(count):
        total += filters.zoomed(image, 1 + number * step)
    return total / np.float32(count + 1)


def gaussian_blur(image: Array, rng: np.random.Generator, scale: float, *, sigma: float) -> Array:
    """Blur by a Gaussian."""
    return filters.gaussian(image, sigma * scale)
