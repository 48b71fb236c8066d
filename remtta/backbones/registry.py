"""Which architectures there are."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import timm
import torch

from remtta.backbones.vit import unwrap
from remtta.errors import ModelError

_log = logging.getLogger("remtta")


def check_adaptable(name: str, model_kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse a timm architecture that no method adapts, before its weights are downloaded or read.

    Args:
        name: As for `load_model`; folders, hub repositories and unknown names are left to it.
        model_kwargs: More arguments for the model, as in timm.

    Raises:
        ModelError: Saying what the methods need.
    """
    architecture = name.partition(".")[0]
    if architecture not in timm.list_models():
        return
    try:
        with torch.device("meta"):  # which takes no memory
            model = timm.create_model(architecture, pretrained=False, **(model_kwargs or {}))
    except Exception as error:  # `load_model` meets it again, and tells it
        _log.debug("%s cannot be checked beforehand: %s", name, error)
        return
    try:
        unwrap(model)
    except ModelError as error:
        raise ModelError(f"{name} cannot be adapted: {error}") from error
