"""The preprocessing of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from remtta.adapt.image_inputs import warn_of_guess
from remtta.errors import UsageError
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import ProtocolName, Resize
from remtta.models.preprocessing import Preprocessing, guessed_options, preprocessing_of

_UNIT_RANGE = {"interpolation": "bilinear", "mean": (0.0,) * 3, "std": (1.0,) * 3}

INPUTS: Mapping[str, Mapping[str, Any]] = {
    "rem-paper": {"input_size": (224, 224), "crop_pct": 224 / 256, **_UNIT_RANGE},
    "rem-paper-cifar": {"input_size": (384, 384), "crop_pct": 1.0, **_UNIT_RANGE},
}
"""A protocol's preprocessing. The REM paper's inputs are in [0, 1] without normalisation: ImageNet-C's resized to 256
and cropped to 224 pixels, CIFAR-C's resized to 384. Batch sizes are defaults of `EvalOptions`.
"""

_log = logging.getLogger(__name__)


def choose_preprocessing(
    model: nn.Module, dataset: Dataset, *, resize: Resize = "auto", protocol: ProtocolName | None = None
) -> Preprocessing:
    """Return the model's preprocessing, but without resizing if all images already have the input size.

    Args:
        model: A timm model; a protocol's values are in its `pretrained_cfg`.
        resize: "auto" as above, or "always" under a protocol; "always" as the model is configured; "never" requires
            images of the input size.

    Raises:
        UsageError: If only some images have the input size, or `resize` is "never" and none has.
    """
    if resize == "auto" and protocol is not None:
        resize = "always"
    configured = preprocessing_of(model)
    height, width = configured.input_size
    fitting, total = dataset.sizes.get((width, height), 0), sum(dataset.sizes.values())
    if resize == "always" or (resize == "auto" and not fitting):
        warn_of_guess(guessed_options(model))
        return configured
    if fitting == total:
        warn_of_guess(guessed_options(model, ("mean", "std")))
        if resize == "auto" and configured.crop_pct != 1:
            _log.info("the images have the model's input size and are used as they are; adapt crops (--resize always)")
        return replace(configured, crop_pct=1.0)
    others = ", ".join(f"{w}x{h}" for (w, h), _ in sorted(dataset.sizes.items(), key=lambda item: -item[1])[:4])
    raise UsageError(
        f"{fitting} of {total} images have the model's input size of {width}x{height}, the others do not "
        f"(sizes: {others}); choose --resize always to resize and crop all of them"
    )
