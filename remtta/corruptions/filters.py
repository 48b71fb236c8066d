"""Blurs, zooms and random layers shared by several corruptions.

Images are float32 of shape (H, W, 3) and layers float32 of shape (H, W), in [0, 1] unless stated otherwise.

Random layers (flakes, drops, fog, ice, displacements) are drawn on a canvas whose short side is the reference size of
the parameters, 224 or 32 px, and then resized to the image. They therefore look alike at every size, and nothing is
resized if the image has the reference size.
"""

from __future__ import annotations

import math

import numpy as np

from remtta.streams.opencv import load_opencv

cv2 = load_opencv("corrupting images")

Array = np.ndarray
"""float32 throughout."""

MAX_SIDE = 32_766
"""The largest height and width of an image in which OpenCV can remap pixels (elastic_transform)."""

_WIDE_REACH = 40  # pixels


def canvas_shape(image: Array, scale: float) -> tuple[int, int]:
    """Return the height and width of the canvas for an image `scale` times the reference size."""
    height, width = image.shape[:2]
    return max(1, round(height / scale)), max(1, round(width / scale))


def fit(layer: Array, image: Array) -> Array:
    """Resize a layer to the height and width of an image: linearly to enlarge, by area to reduce."""
    height, width = image.shape[:2]
    if layer.shape[:2] == (height, width):
        return layer
    smaller = height * width < layer.shape[0] * layer.shape[1]
    return cv2.resize(layer, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR)


def gaussian(layer: Array, sigma: float, *, truncate: float = 4.0, reflect: bool = False) -> Array:
    """Blur a layer (H, W) or (H, W, C) with a Gaussian of `sigma` pixels, cut off at `truncate` standard deviations.

    Edge pixels are repeated beyond the border, or the layer is mirrored there, edge pixels included (`reflect`).
    """
    reach = int(truncate * sigma + 0.5)
    if reach == 0:
        return layer
    border = cv2.BORDER_REFLECT if reflect else cv2.BORDER_REPLICATE
    side = 2 * reach + 1
    if reach <= _WIDE_REACH or side > min(layer.shape[:2]):
        return cv2.GaussianBlur(layer, (side, side), sigma, borderType=border)
    # Large kernels use the Fourier transform, which is faster for photographs of many megapixels.
    line = cv2.getGaussianKernel(side, sigma, cv2.CV_32F)
    return cv2.filter2D(layer, -1, line @ line.T, borderType=border)


def motion(layer: Array, radius: float, sigma: float, angle: float) -> Array:
    """Blur a layer (H, W) or (H, W, C) along a line at an angle in degrees, as ImageMagick's motion blur does.

    The one-sided Gaussian of `sigma` pixels has 2 * radius + 1 taps.
    """
    return cv2.filter2D(layer, -1, motion_kernel(radius, sigma, angle), borderType=cv2.BORDER_REPLICATE)


def motion_kernel(radius: float, sigma: float, angle: float) -> Array:
    """Return the kernel of `motion`: shape (N, N) with N odd, summing to 1, along a line from the centre outwards."""
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
