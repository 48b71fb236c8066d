"""Folders of CIFAR-C arrays: <corruption>.npy of five severities one after the other, and labels.npy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.errors import StreamError, UsageError
from remtta.evaluation.domains import SEVERITIES, Domain

LABELS = "labels.npy"


def find_arrays(root: Path) -> dict[str, Path]:
    """The arrays by corruption.

    Raises:
        UsageError: If there is none.
    """
    arrays = {path.stem: path for path in root.glob("*.npy") if path.name != LABELS}
    if not arrays:
        raise UsageError(f"{root} has {LABELS} but no <corruption>.npy")
    return arrays


def load_labels(root: Path, num_classes: int) -> np.ndarray:
    """Class numbers, shape (N,) or (5 N,), int64.

    Raises:
        UsageError: If they are no class numbers, or the model has no such class.
        StreamError: If they cannot be read.
    """
    labels = _load_array(root / LABELS)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise UsageError(f"{root / LABELS} must hold one whole number per image, got {labels.shape}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UsageError(
            f"{root / LABELS} names class {labels.max()}, but the model has {num_classes}; see --num-classes"
        )
    return labels.astype(np.int64)


def array_domain(path: Path, labels: np.ndarray, severity: int, limit: int | None) -> Domain:
    """One severity of an array, or its first `limit` images.

    Raises:
        UsageError: If it is no array, or its shape does not fit.
        StreamError: If it cannot be read.
    """
    pixels = _load_array(path)
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or len(pixels) % len(SEVERITIES):
        raise UsageError(f"{path} must hold 5 severities of uint8 images (5 N, H, W, 3), got {pixels.shape}")
    rows = len(pixels) // len(SEVERITIES)
    if len(labels) not in (rows, len(pixels)):
        raise UsageError(f"{path} has {len(pixels)} images, but {LABELS} has {len(labels)} labels")
    start = (severity - 1) * rows
    count = min(rows, limit or rows)
    own = labels[:count] if len(labels) == rows else labels[start : start + count]
    sources = [f"{path}[{start + row}]" for row in range(count)]
    return Domain(path.stem, severity, sources, own, _Images(path, pixels, start))


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of an array's images."""
    _, height, width, _ = _load_array(path).shape
    return width, height


class _Images:
    """Images of an array from some position on; a worker that gets them opens the file by itself."""

    def __init__(self, path: Path, pixels: np.ndarray, start: int) -> None:
        self._path, self._pixels, self._start = path, pixels, start

    def __call__(self, position: int) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self._pixels[self._start + position]))

    def __reduce__(self) -> tuple[Callable[[Path, int], _Images], tuple[Path, int]]:
        return _images_of, (self._path, self._start)


def _images_of(path: Path, start: int) -> _Images:
    return _Images(path, _load_array(path), start)


def _load_array(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise StreamError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path} cannot be read as an array: {error}") from error
    return array
