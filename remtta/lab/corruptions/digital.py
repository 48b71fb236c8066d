"""Noise, brightness, contrast, saturation, elastic distortion, pixelation and JPEG."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from remtta.lab.corruptions.blur import Array, cv2, gaussian_filter
from remtta.lab.corruptions.weather import canvas_shape, resized_to


def to_float(image: Image.Image) -> Array:
    """Convert an RGB image to an array of shape (H, W, 3) in [0, 1]."""
    return np.asarray(image, dtype=np.float32) / np.float32(255)


def to_image(pixels: Array) -> Image.Image:
    """Convert an array of shape (H, W, 3) to an 8-bit RGB image, clipping to [0, 1] and rounding to nearest."""
    return Image.fromarray(np.rint(pixels.clip(0, 1) * 255).astype(np.uint8))


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


def brightness(image: Array, rng: np.random.Generator, scale: float, *, added: float) -> Array:
    """Add to the HSV value, keeping hue and saturation."""
    value: Array = image.max(axis=2, keepdims=True)
    brighter = (value + np.float32(added)).clip(0, 1)
    ratio = np.divide(brighter, value, out=np.zeros_like(value), where=value > 0)
    return np.where(value > 0, image * ratio, brighter)  # black has no hue: it becomes grey


def saturate(image: Array, rng: np.random.Generator, scale: float, *, factor: float, added: float) -> Array:
    """Scale and shift the HSV saturation, keeping hue and value. Greys have hue 0 and so turn red."""
    value: Array = image.max(axis=2, keepdims=True)
    chroma = value - image  # distance of each channel from the strongest
    spread = chroma.max(axis=2, keepdims=True)
    coloured = spread > 0
    hue = np.divide(chroma, spread, out=np.empty_like(chroma), where=coloured)
    hue = np.where(coloured, hue, np.array([0, 1, 1], dtype=np.float32))
    saturation = np.divide(spread, value, out=np.zeros_like(value), where=value > 0)
    return value * (1 - hue * (saturation * np.float32(factor) + np.float32(added)).clip(0, 1))


def contrast(image: Array, rng: np.random.Generator, scale: float, *, factor: float) -> Array:
    """Move every channel towards its mean over the image."""
    mean = image.mean(axis=(0, 1), dtype=np.float64).astype(np.float32)
    return (image - mean) * np.float32(factor) + mean


def elastic_transform(
    image: Array, rng: np.random.Generator, scale: float, *, strength: float, sigma: float, shift: float
) -> Array:
    """Apply a small random affine transform, then displace each pixel along a smooth random field."""
    sheared = _random_affine(image, rng, shift * scale)
    if strength == 0:
        return sheared
    height, width = image.shape[:2]
    fields = [_displacement(image, rng, scale, strength, sigma) for _ in range(2)]
    columns = fields[0] + np.arange(width, dtype=np.float32)
    rows = fields[1] + np.arange(height, dtype=np.float32)[:, None]
    return cv2.remap(sheared, columns, rows, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT)


def _random_affine(image: Array, rng: np.random.Generator, shift: float) -> Array:
    """Warp the image by moving three corners of a centered square by up to `shift` pixels along each axis."""
    height, width = image.shape[:2]
    half = min(height, width) / 3
    corners = np.array([[1, 1], [1, -1], [-1, -1]]) * half + [width / 2, height / 2]
    moved = corners + rng.uniform(-shift, shift, corners.shape)
    matrix = cv2.getAffineTransform(corners.astype(np.float32), moved.astype(np.float32))
    return cv2.warpAffine(image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)


def _displacement(image: Array, rng: np.random.Generator, scale: float, strength: float, sigma: float) -> Array:
    """Return smoothed noise in image pixels, shape (H, W)."""
    noise = rng.uniform(-1, 1, canvas_shape(image, scale)).astype(np.float32)
    smooth = gaussian_filter(noise, sigma, truncate=3.0, reflect=True)
    return resized_to(smooth, image) * np.float32(strength * scale)


def pixelate(image: Array, rng: np.random.Generator, scale: float, *, fraction: float) -> Array:
    """Downscale to a fraction of the width and height and upscale again, with box filters."""
    picture = to_image(image)
    small = (max(1, int(picture.width * fraction)), max(1, int(picture.height * fraction)))
    return to_float(picture.resize(small, Image.Resampling.BOX).resize(picture.size, Image.Resampling.BOX))


def jpeg_compression(image: Array, rng: np.random.Generator, scale: float, *, quality: float) -> Array:
    """Compress as JPEG with 4:2:0 chroma subsampling, and decompress."""
    packed = io.BytesIO()
    to_image(image).save(packed, "JPEG", quality=int(quality))
    with Image.open(packed) as unpacked:
        return to_float(unpacked.convert("RGB"))
