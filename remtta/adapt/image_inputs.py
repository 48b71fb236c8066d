"""Turn the images that an adapter is given into the model's inputs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from remtta.backbones.backbone import check_dense, check_images
from remtta.errors import UsageError
from remtta.models.info import UNKNOWN, ModelInfo
from remtta.streams.images import to_rgb

Images = Tensor | np.ndarray | Sequence[Image.Image | np.ndarray]
"""Preprocessed float32 or raw uint8 images (B, 3, H, W) of the model's size; or pictures of any size: Pillow's,
or uint8 arrays (H, W, 3) in RGB or (H, W) in gray."""

_PATH = "{} is a path, not a picture; pass paths to remtta.stream"
_UNKNOWN = (
    "the model's preprocessing is unknown; pass remtta.Adapter the one of its training, preprocessing="
    "remtta.Preprocessing((H, W), mean, std), without mean and std for ImageNet's, or preprocess the images: float32"
)
_FAR = 30  # times the largest value of a preprocessed image

_log = logging.getLogger("remtta")


class ImageInputs:
    """Turns images into inputs of the model with this info, and warns once of what is probably wrong with them."""

    def __init__(self, info: ModelInfo) -> None:
        self._info, self._warned_of_guess, self._warned_of_range = info, False, False

    def inputs(self, images: Images) -> Tensor:
        """Return inputs (B, 3, H, W), on the model's device; raise ValueError if they are not finite images, and
        UsageError as `check_known` does if they are not preprocessed.
        """
        if not isinstance(images, Tensor):
            self.check_known()
            transform = self._info.preprocessing.transform()
            images = torch.stack([transform(picture) for picture in pictures_of(images)])
        check_dense(images)
        if images.is_meta:
            raise ValueError("images must hold values, got a meta tensor")
        images = images.detach()
        if images.dtype == torch.uint8:
            check_images(images, None, torch.uint8)  # before their channels meet the mean's
            self.check_known()
            return self._info.preprocessing.normalise(images.to(self._info.device))
        if images.is_floating_point() and images.numel():
            if not images.isfinite().all():
                raise ValueError("the images hold values that are not finite numbers")
            self._warn_of_range(float(images.abs().max()))
        return images.to(self._info.device)

    def check_known(self) -> None:
        """Raise UsageError if the preprocessing of a caller's own model is not known; warn once if that of a file."""
        if "--mean" in self._info.guessed and self._info.name == UNKNOWN:
            raise UsageError(_UNKNOWN)
        if not self._warned_of_guess:
            warn_of_guess(self._info.guessed)
        self._warned_of_guess = True

    def _warn_of_range(self, largest: float) -> None:
        """Warn once of a value that no preprocessed image has."""
        means, stds = self._info.preprocessing.mean, self._info.preprocessing.std
        usual = max(max(mean, 1 - mean) / std for mean, std in zip(means, stds, strict=True))
        if largest > _FAR * usual and not self._warned_of_range:
            text = (
                "float images reach %.0f, preprocessed ones at most %.1f; preprocess them, or give raw images as uint8"
            )
            _log.warning(text, largest, usual)
            self._warned_of_range = True


def warn_of_guess(guessed: str) -> None:
    """Warn of the options of a model's preprocessing that are guessed, if any."""
    if guessed:
        partly = "" if "--mean" in guessed else "partly "
        _log.warning(
            "the model's preprocessing is %sunknown: assuming %s; set the values that it was trained with "
            "(preprocessing= in Python)",
            *(partly, guessed),
        )


def pictures_of(images: np.ndarray | Sequence[Image.Image | np.ndarray]) -> list[Image.Image]:
    """Return pictures as RGB images; raise ValueError if they are none."""
    if isinstance(images, str | Path):
        raise ValueError(_PATH.format(images))
    listed = isinstance(images, Sequence) or (isinstance(images, np.ndarray) and images.ndim == 4)
    if not listed or len(images) == 0:
        raise ValueError("images are a list of at least one picture, or a tensor (B, 3, H, W); for one, pass [image]")
    return [_picture(image) for image in images]


def _picture(image: object) -> Image.Image:
    if isinstance(image, str | Path):
        raise ValueError(_PATH.format(image))
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size:
        image = Image.fromarray(image) if image.ndim == 2 or image.shape[2:] == (3,) else image
    if isinstance(image, Image.Image):
        try:
            return to_rgb(ImageOps.exif_transpose(image))  # as a file is read
        except OSError as error:
            raise ValueError(f"a picture cannot be read: {error}") from error
    got = f"{image.dtype} of {tuple(image.shape)}" if isinstance(image, np.ndarray | Tensor) else type(image).__name__
    raise ValueError(
        f"a picture is a PIL image, or a uint8 array of shape (H, W, 3) in RGB or (H, W) in gray, got {got}; "
        "pass preprocessed images as one tensor (B, 3, H, W)"
    )
