"""The preprocessing and labels in files that transformers saves, in the terms of timm's `pretrained_cfg`.

Imports no timm, which ONNX files do without.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from remtta.errors import CheckpointError
from remtta.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, check_preprocessing

Config = Mapping[str, Any]
Size = tuple[int, int]

_log = logging.getLogger(__name__)


PREPROCESSOR = "preprocessor_config.json"
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers
_MIN_SQUASHED = 384  # ConvNeXt's processor squashes images of at least so many pixels, and crops smaller ones

_INCEPTION = (0.5, 0.5, 0.5)
_HALF = {"image_mean": _INCEPTION, "image_std": _INCEPTION}
_SHORT_SIDE = {"default_to_square": False}  # of a plain number as size
_CROPPED = {"do_center_crop": True, "crop_size": 224}
_CLIP = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "resample": 3,
    "size": {"shortest_edge": 224},
    **_SHORT_SIDE,
    **_CROPPED,
}
_MOBILENET = {**_HALF, "resample": 2, "size": {"shortest_edge": 256}, **_SHORT_SIDE, **_CROPPED}
_PROCESSORS: Mapping[str, Config] = {
    "ViT": {**_HALF, "resample": 2, "size": (224, 224)},
    "DeiT": {**_HALF, "resample": 3, "size": (256, 256), **_CROPPED},
    "Beit": {**_HALF, "resample": 3, "size": (224, 224), "crop_size": 224},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Siglip": {**_HALF, "resample": 3, "size": (224, 224), **_SHORT_SIDE},
    "ConvNext": {**_HALF, "resample": 3, "size": {"shortest_edge": 384}, **_SHORT_SIDE, "crop_pct": 224 / 256},
    "EfficientNet": {**_HALF, "resample": 3, "size": (346, 346), "crop_size": 289, "include_top": True},
    "MobileNetV1": _MOBILENET,
    "MobileNetV2": _MOBILENET,
}
"""Defaults for values missing in the file, by the processor's class."""


def labels_in(path: Path, config: Config) -> list[str]:
    """Return the name of each class in a config.json; transformers saves none for two classes."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        return [str(names[str(number)]) for number in range(len(names))]
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{path} has an id2label that does not count from 0: {str(names)[:80]}") from error


def are_placeholders(labels: list[str]) -> bool:
    """Return whether these are the names that transformers gives to classes without any."""
    return labels == [f"LABEL_{number}" for number in range(len(labels))]


def image_settings(folder: Path, model_type: str, image_size: Size) -> Config:
    """Return the preprocessing of a folder saved by transformers, in the terms of timm's `pretrained_cfg`.

    Without a preprocessor_config.json, it is that of the published models of this `model_type`, with a warning. Raise
    CheckpointError if the file cannot be read, or timm has no such preprocessing.
    """
    path = folder / PREPROCESSOR
    if not path.is_file():
        return _usual_settings(path, model_type, image_size)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        processor = _processor(path, content)
        given = {key: value for key, value in content.items() if value is not None or key == "default_to_square"}
        config = {**_PROCESSORS[processor], **given}
        settings = {**_geometry(path, processor, config), **_colours(config)}
        check_preprocessing(settings["mean"], settings["std"], settings["interpolation"], settings["crop_pct"])
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{path} is not a readable preprocessing config ({reason}); correct or remove it"
        ) from error
    return settings


def _usual_settings(path: Path, model_type: str, image_size: Size) -> Config:
    """Return the preprocessing of the family's published models."""
    vit, squashes = model_type == "vit", model_type in ("vit", "swin")
    settings: dict[str, Any] = {
        "input_size": (3, *image_size),
        "mean": _INCEPTION if vit else IMAGENET_MEAN,
        "std": _INCEPTION if vit else IMAGENET_STD,
        "interpolation": "bilinear" if vit else "bicubic",
        "crop_pct": 1.0 if squashes else 0.875,
        "crop_mode": "squash" if squashes else "center",
    }
    mean, std = (" ".join(map(str, settings[name])) for name in ("mean", "std"))
    _log.warning(
        "%s has no %s; where --mean, --std, --interpolation and --crop-pct do not say otherwise, images get the "
        "mean %s, the standard deviation %s and the filter %s, as is usual for %s",
        *(path.parent, path.name, mean, std, settings["interpolation"], model_type),
    )
    return settings


def _processor(path: Path, content: Config) -> str:
    """Return the processor's class without the suffix of its version."""
    saved = str(content.get("image_processor_type") or content.get("feature_extractor_type"))
    name = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", saved)
    if name not in _PROCESSORS:
        known = ", ".join(f"{processor}ImageProcessor" for processor in _PROCESSORS)
        raise CheckpointError(
            f"{path} is of {saved}, and remtta knows {known}; remove it, and give --mean, --std, --interpolation and "
            "--crop-pct"
        )
    return name


def _colours(config: Config) -> Config:
    """Translate rescaling and normalising to a mean and a standard deviation of pixels in [0, 1]."""
    scale = 255 * (config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1)
    offset = float(bool(config.get("rescale_offset") and config.get("do_rescale", True)))
    mean, std = (np.broadcast_to(config[name], 3).astype(float) for name in ("image_mean", "image_std"))
    twice = std if config.get("include_top") else 1.0  # EfficientNet's processor divides once more
    if not config.get("do_normalize", True):
        mean, std = 0 * mean, 1 + 0 * std
    return {"mean": tuple(((mean + offset) / scale).tolist()), "std": tuple((std * twice / scale).tolist())}


def _geometry(path: Path, processor: str, config: Config) -> Config:
    """Translate resizing and cropping; raise CheckpointError if timm has no such transform."""
    crop = pair(config["crop_size"]) if config.get("do_center_crop") else None
    size = config["size"]
    if isinstance(size, int) and not config.get("default_to_square", True):
        size = {"shortest_edge": size}
    short_side = size.get("shortest_edge") if isinstance(size, dict) else None
    resized = pair(size) if short_side is None else (short_side, short_side)
    if processor == "ConvNext" and short_side is not None:
        if crop not in (None, resized):
            raise CheckpointError(f"{path} crops images twice, to {resized} and {crop}; set do_center_crop to false")
        crop, short_side = (
            (resized, int(short_side / config["crop_pct"])) if short_side < _MIN_SQUASHED else (None, None)
        )
        resized = resized if short_side is None else (short_side, short_side)
    if config.get("do_pad") or (isinstance(size, dict) and short_side is not None and len(size) > 1):
        raise CheckpointError(f"{path} pads images or limits their long side ({size}), as timm cannot; remove that")
    if not config.get("do_resize", True):
        if crop is not None:
            raise CheckpointError(f"{path} crops {crop} of images without resizing them; set do_resize to true")
    elif short_side is not None and (crop is None or crop[0] != crop[1]):
        raise CheckpointError(
            f"{path} keeps the aspect ratio of images ({size}); remtta needs one size: add a crop_size"
        )
    final = crop or resized
    shares = (final[0] / (resized[0] + rest) for rest in (0, 0.5))  # timm rounds the quotient down
    crop_pct = next((p for p in shares if p <= 1 and (int(final[0] / p), int(final[1] / p)) == resized), None)
    if crop_pct is None:
        raise CheckpointError(f"{path} crops {crop} of {resized}, larger or of another shape; timm cannot do that")
    return {
        "input_size": (3, *final),
        "crop_pct": crop_pct,
        "crop_mode": f"{'squash' if short_side is None else 'center'}{'_floor' if crop else ''}",
        "interpolation": _FILTERS[config["resample"]],
    }


def pair(value: int | Sequence[int] | Mapping[str, int]) -> Size:
    """Return height and width from both (by name or in this order) or from one number."""
    if isinstance(value, Mapping):
        value = (value["height"], value["width"])
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)
