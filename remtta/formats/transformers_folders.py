"""Build image classifiers from folders saved by Hugging Face's transformers, as equivalent timm models.

Transformers' own modules, adapted by the generic backbone, would need the package and update more slowly (a ViT-S by
12 % with REM); Swin would have no scores for its masks, and FOA, ViDA, Continual-MAE and BECoTTA would not run.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from remtta.errors import CheckpointError, first_line
from remtta.formats.loaders import find_weights, folder_of, read_config
from remtta.formats.transformers_models import FAMILIES, SUPPORTED, Family
from remtta.formats.transformers_names import to_timm_names
from remtta.formats.transformers_processors import (
    PREPROCESSOR,
    Config,
    Size,
    are_placeholders,
    image_settings,
    labels_in,
    pair,
)
from remtta.models.building import check_size
from remtta.models.timm_loading import load_into
from remtta.options import ModelOptions

_log = logging.getLogger(__name__)


def load_folder(options: ModelOptions) -> nn.Module:
    """Load the classifier in a folder. Raise CheckpointError if timm has no equivalent, or the weights do not fit."""
    name, folder = options.name or "", folder_of(options)
    build = partial(build_folder, folder, read_config(options), options.num_classes, options.input_size)
    check_size(name, options.checkpoint, build)
    return load_into(build(), options, Path(options.checkpoint or find_weights(folder)))


def build_folder(folder: Path, saved: Config, num_classes: int | None, input_size: Size | None) -> nn.Module:
    """Build the timm model that a folder's config.json describes, without its weights.

    Preprocessing and class names are put in its `pretrained_cfg`. Raise CheckpointError if timm has no equivalent
    classifier, with the reason.
    """
    model_type = saved.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{folder} holds a model of type {model_type!r}; of transformers' models remtta reads "
            f"{', '.join(FAMILIES)}; convert it to timm's names, for --checkpoint"
        )
    family = FAMILIES[model_type]
    config, path = {**family.defaults, **saved}, folder / "config.json"
    try:
        _check_supported(path, config, family)
        labels = labels_in(path, config)
        trained_size = pair(config["image_size"])
        settings = image_settings(folder, model_type, trained_size)
        size = input_size or settings["input_size"][1:]
        if family.fixed_size and input_size is None and size != trained_size:
            raise CheckpointError(
                f"{folder}: {PREPROCESSOR} makes images of {size[0]} x {size[1]} pixels, and "
                f"config.json has a model for {trained_size[0]} x {trained_size[1]}; choose with --input-size"
            )
        if model_type == "swin":
            _check_windows(folder, config, size)
        model: Any = family.build(config, size, num_classes or len(labels))
    except (TypeError, ValueError, LookupError, ArithmeticError, AssertionError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {first_line(error) if str(error) else 'no reason given'}"
        raise CheckpointError(f"{path} describes no model that can be built ({reason})") from error
    model.rename_weights = to_timm_names  # read by remtta.models.checkpoints
    model.pretrained_cfg = model.default_cfg = {
        **settings,
        "input_size": (3, *size),
        "num_classes": len(labels),
        "label_names": None if are_placeholders(labels) else labels,
        "pos_embed_antialias": model_type == "dinov2_with_registers",  # else resized without, unlike timm's
    }
    return model


def _check_supported(path: Path, config: Config, family: Family) -> None:
    """Raise CheckpointError if this is not a classifier, or has an option that timm's model does not support."""
    saved = config.get("architectures") or family.classifiers[:1]
    if saved[0] not in family.classifiers:
        raise CheckpointError(f"{path} says {saved[0]}; remtta reads {' and '.join(family.classifiers)}")
    for option, values in {**SUPPORTED, **family.supported}.items():
        if config.get(option, values[0]) not in values:
            raise CheckpointError(f"{path} says {option}={config[option]!r}; timm's model supports only {values[0]!r}")


def _check_windows(folder: Path, config: Config, size: Size) -> None:
    """Raise for images that need padding, which transformers applies before shifting windows, and timm afterwards."""
    stages, window, patch = len(config["depths"]), config["window_size"], pair(config["patch_size"])
    for stage in range(stages):
        rows, columns = (pixels / (side * 2**stage) for pixels, side in zip(size, patch, strict=True))
        tiled = rows % window == columns % window == 0
        if not tiled or min(rows, columns) == window != max(rows, columns):
            units = [side * 2 ** (stages - 1) * window for side in patch]
            raise CheckpointError(
                f"{folder}: images of {size[0]} x {size[1]} pixels do not divide into this Swin's windows; "
                f"choose an --input-size that is a multiple of {units[0]} x {units[1]}"
            )
