"""The preprocessor_config.json of Hugging Face's transformers, as timm's preprocessing."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_INCEPTION_MEAN,
    IMAGENET_INCEPTION_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from remtta.errors import CheckpointError
from remtta.models.huggingface_models import Config, Size, pair
from remtta.models.preprocessing import check_preprocessing

_log = logging.getLogger("remtta")

_FILE = "preprocessor_config.json"
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by Pillow's numbers
_WARPED = 384  # pixels from which on ConvNeXt's processor squashes images

_HALF = {"image_mean": IMAGENET_INCEPTION_MEAN, "image_std": IMAGENET_INCEPTION_STD}
_CLIP = {
    "image_mean": OPENAI_CLIP_MEAN,
    "image_std": OPENAI_CLIP_STD,
    "resample": 3,
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": 224,
}
_PROCESSORS: Mapping[str, Config] = {
    "ViT": {**_HALF, "resample": 2, "size": 224},
    "DeiT": {**_HALF, "resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "ConvNext": {**_HALF, "resample": 3, "size": {"shortest_edge": 384}, "crop_pct": 224 / 256},
}
"""Classes of processors, and what they do where the file says nothing."""
_KEEPING_RATIO = ("Bit", "CLIP", "ConvNext")  # whose size is one of the short side where it is a number


def image_settings(folder: Path, model_type: str, image_size: Size) -> dict[str, Any]:
    """The preprocessing of a folder that transformers saved, in the terms of timm's `pretrained_cfg`.

    Args:
        folder: With a preprocessor_config.json; without one, the preprocessing is what the family's published
            models have, which is said.
        model_type: The model's, in config.json.
        image_size: Height and width of the model's images, in pixels.

    Raises:
        CheckpointError: If the file cannot be read, or timm has no such preprocessing.
    """
    path = folder / _FILE
    if not path.is_file():
        return _usual(folder, model_type, image_size)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind = _kind(path, content)
        config = {**_PROCESSORS[kind], **{key: value for key, value in content.items() if value is not None}}
        settings = {**_geometry(path, kind, config), **_colours(path, config)}
        check_preprocessing(settings["mean"], settings["std"], settings["interpolation"], settings["crop_pct"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is no preprocessing that can be read ({what}); correct or remove it") from error
    return settings


def _usual(folder: Path, model_type: str, image_size: Size) -> dict[str, Any]:
    """Of the family's published models."""
    squashed, plain = model_type in ("vit", "swin"), model_type == "vit"
    mean, std = (
        (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD) if plain else (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    filter_ = "bilinear" if plain else "bicubic"
    _log.warning(
        "%s has no %s; where --mean, --std, --interpolation and --crop-pct do not say otherwise, images get the "
        "mean %s, the deviation %s and the filter %s, as is usual for %s",
        folder,
        _FILE,
        " ".join(map(str, mean)),
        " ".join(map(str, std)),
        filter_,
        model_type,
    )
    return {
        "input_size": (3, *image_size),
        "mean": mean,
        "std": std,
        "interpolation": filter_,
        "crop_pct": 1.0 if squashed else 0.875,
        "crop_mode": "squash" if squashed else "center",
    }


def _kind(path: Path, config: Config) -> str:
    """Return the kind of processor, whatever its version is called."""
    name = str(config.get("image_processor_type") or config.get("feature_extractor_type"))
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name)
    if kind not in _PROCESSORS:
        known = ", ".join(f"{each}ImageProcessor" for each in _PROCESSORS)
        raise CheckpointError(
            f"{path} is of {name}, and remtta knows {known}; remove it, and give --mean, --std, --interpolation and "
            "--crop-pct"
        )
    return kind


def _colours(path: Path, config: Config) -> dict[str, Any]:
    if not config.get("do_rescale", True) or not math.isclose(config.get("rescale_factor", 1 / 255), 1 / 255):
        raise CheckpointError(f"{path} does not divide pixels by 255, as remtta does; give the model such images")
    if not config.get("do_normalize", True):
        return {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return {"mean": _three(config["image_mean"]), "std": _three(config["image_std"])}


def _three(values: Any) -> tuple[float, ...]:
    """A number for each colour."""
    return (float(values),) * 3 if isinstance(values, int | float) else tuple(map(float, values))


def _geometry(path: Path, kind: str, config: Config) -> dict[str, Any]:
    """Translate what becomes of an image's shape.

    Raises:
        CheckpointError: If timm has no such transform.
    """
    crop = pair(config["crop_size"]) if config.get("do_center_crop") else None
    size = config["size"]
    short = size.get("shortest_edge") if isinstance(size, dict) else size if kind in _KEEPING_RATIO else None
    if kind == "ConvNext" and short is not None:
        crop, short, size = _convnext(short, config["crop_pct"])
    resized = (short, short) if short is not None else pair(size)
    if not config.get("do_resize", True):
        resized, crop = (crop or resized), None  # images are of that size already
    elif short is not None and (crop is None or crop[0] != crop[1]):
        raise CheckpointError(f"{path} keeps the shapes of images ({size}); remtta makes all of one: add a crop_size")
    crop_pct = _share(crop or resized, resized)
    if crop_pct is None:
        raise CheckpointError(f"{path} crops {crop} of {resized}, which are not of one shape; timm cannot do so")
    return {
        "input_size": (3, *(crop or resized)),
        "crop_pct": crop_pct,
        "crop_mode": "center" if short is not None and crop else "squash",
        "interpolation": _FILTERS[config["resample"]],
    }


def _convnext(short: int, crop_pct: float) -> tuple[Size | None, int | None, Any]:
    """A crop, the short side before it, and the size of images that are squashed instead."""
    if short < _WARPED:
        return (short, short), int(short / crop_pct), short
    return None, None, short


def _share(crop: Size, resized: Size) -> float | None:
    """The crop_pct by which timm comes to both; None if there is none."""
    for share in (crop[0] / resized[0], crop[0] / (resized[0] + 0.5)):
        if share <= 1 and all(math.floor(c / share) == r for c, r in zip(crop, resized, strict=True)):
            return share
    return None
