"""Pictures and raw tensors that an adapter is given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor


def pictures_of(images: Sequence[Image.Image | np.ndarray]) -> list[Image.Image]:
    """Return pictures, RGB or gray, as RGB images; raise ValueError if they are none."""
    if isinstance(images, Image.Image) or len(images) == 0 or (isinstance(images, np.ndarray) and images.ndim < 4):
        raise ValueError("images are a list of at least one picture, or a tensor (B, 3, H, W); for one, pass [image]")
    return [_picture(image) for image in images]


def _picture(image: object) -> Image.Image:
    if isinstance(image, str | Path):
        raise ValueError(f"{image} is a path, not a picture; pass paths to remtta.stream")
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and (image.ndim == 2 or image.shape[2:] == (3,)):
        image = Image.fromarray(image)
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    got = f"{image.dtype} of {tuple(image.shape)}" if isinstance(image, np.ndarray | Tensor) else type(image).__name__
    raise ValueError(
        f"a picture is a PIL image, or a uint8 array of shape (H, W, 3) in RGB or (H, W) in gray, got {got}; "
        "pass preprocessed images as one tensor (B, 3, H, W)"
    )
