"""Blur: out of focus, behind frosted glass, in motion, while zooming, and Gaussian; and the filters that do it.

Lengths in pixels are multiplied by `scale`. The filters take an image (H, W, 3) or a layer (H, W), float32.
"""

from __future__ import annotations

import math
from array import array

import numpy as np

from remtta.streams.capture import load_opencv

cv2 = load_opencv("corrupting images")

Array = np.ndarray
"""float32 throughout."""

MAX_SIDE = 32_766
"""The largest height and width of an image in which OpenCV can remap pixels (elastic_transform)."""

_WIDE_RADIUS = 8  # above this, the disk's edge is smoothed over two pixels per side instead of one
WIDE_REACH = 40  # pixels
LIST_UP_TO = 4_000_000  # pixels; a list swaps twice as fast as an array but takes ten times the memory


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
    smooth = gaussian_filter(image, sigma * scale)
    order = shuffled_nearby(height, width, max(1, round(distance * scale)), int(passes), rng)
    shuffled = smooth.reshape(-1, 3)[order].reshape(image.shape)
    return gaussian_filter(shuffled, sigma * scale)


def shuffled_nearby(height: int, width: int, distance: int, passes: int, rng: np.random.Generator) -> np.ndarray:
    """Return the source position of each pixel after random swaps with pixels up to `distance` rows and columns away.

    Positions are flat, shape (H * W,), each once. A pass goes from the bottom right to the top left, so a pixel may be
    swapped several times, and carried further. Each swap therefore depends on earlier ones, so this is a plain loop
    over positions, which is fast enough.
    """
    positions = range(height * width)
    order = list(positions) if len(positions) <= LIST_UP_TO else array("q", positions)
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
    return motion_filter(image, radius * scale, sigma * scale, rng.uniform(-45, 45))


def zoom_blur(image: Array, rng: np.random.Generator, scale: float, *, zoom: float, step: float) -> Array:
    """Average the image with progressively zoomed centre crops, as if moving forward with the shutter open."""
    count = math.ceil(round((zoom - 1) / step, 6))  # zoom excluded; `round` absorbs floating-point error
    total = image.copy()
    for number in range(count):
        total += zoomed(image, 1 + number * step)
    return total / np.float32(count + 1)


def gaussian_blur(image: Array, rng: np.random.Generator, scale: float, *, sigma: float) -> Array:
    """Blur by a Gaussian."""
    return gaussian_filter(image, sigma * scale)


def gaussian_filter(layer: Array, sigma: float, *, truncate: float = 4.0, reflect: bool = False) -> Array:
    """Blur a layer (H, W) or (H, W, C) with a Gaussian of `sigma` pixels, cut off at `truncate` standard deviations.

    Edge pixels are repeated beyond the border, or the layer is mirrored there, edge pixels included (`reflect`).
    """
    reach = int(truncate * sigma + 0.5)
    if reach == 0:
        return layer
    border = cv2.BORDER_REFLECT if reflect else cv2.BORDER_REPLICATE
    side = 2 * reach + 1
    if reach <= WIDE_REACH or side > min(layer.shape[:2]):
        return cv2.GaussianBlur(layer, (side, side), sigma, borderType=border)
    # Large kernels use the Fourier transform, which is faster for photographs of many megapixels.
    line = cv2.getGaussianKernel(side, sigma, cv2.CV_32F)
    return cv2.filter2D(layer, -1, line @ line.T, borderType=border)


def motion_filter(layer: Array, radius: float, sigma: float, angle: float) -> Array:
    """Blur a layer (H, W) or (H, W, C) along a line at an angle in degrees, as ImageMagick's motion blur does.

    The one-sided Gaussian of `sigma` pixels has 2 * radius + 1 taps.
    """
    return cv2.filter2D(layer, -1, motion_kernel(radius, sigma, angle), borderType=cv2.BORDER_REPLICATE)


def motion_kernel(radius: float, sigma: float, angle: float) -> Array:
    """Return the kernel of `motion_filter`, shape (N, N) with N odd: a line from the centre outwards that sums to 1."""
    steps = np.arange(2 * round(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    rows = np.rint(steps * math.sin(math.radians(angle))).astype(int)
    columns = np.rint(steps * math.cos(math.radians(angle))).astype(int)
    reach = int(max(np.abs(rows).max(), np.abs(columns).max()))
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    np.add.at(kernel, (reach + rows, reach + columns), weights / weights.sum())
    return kernel.astype(np.float32)


def zoomed(layer: Array, zoom: float) -> Array:
    """Return the centre of a layer, magnified `zoom` times by linear interpolation to the layer's size."""
    height, width = layer.shape[:2]
    shift_x, shift_y = ((side - 1) / 2 * (1 - 1 / zoom) for side in (width, height))
    to_source = np.array([[1 / zoom, 0, shift_x], [0, 1 / zoom, shift_y]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(layer, to_source, (width, height), flags=flags, borderMode=cv2.BORDER_REPLICATE)
