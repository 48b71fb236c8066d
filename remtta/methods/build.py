"""Set up a method on a model."""

from __future__ import annotations

import functools
import logging
from typing import TypeVar

import torch
from torch import nn

from remtta.backbones.lookup import backbone_of
from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.source import Source
from remtta.methods.table import METHOD_TABLE, check_method, method_config
from remtta.options import DEFAULT_BATCH_SIZE

M = TypeVar("M", bound=Method[MethodConfig])

_log = logging.getLogger(__name__)


def build_method(name: str, model: nn.Module, config: MethodConfig | None = None) -> Method[MethodConfig]:
    """Set up a method of METHOD_TABLE on a model, which it adapts in place; with its default settings without a config.

    Everything but the selected weights is frozen, and the model is put in eval mode. Raise UsageError if the method is
    unknown, or its settings do not suit the model; ModelError if the method cannot adapt the model.
    """
    check_method(name, METHOD_TABLE)
    config = config or method_config(name, {}, batch_size=DEFAULT_BATCH_SIZE)
    return create_method(METHOD_TABLE[name].method, model, config)


@torch.inference_mode(False)
def create_method(method: type[M], model: nn.Module, config: MethodConfig) -> M:
    """Set up a method of a class on a model; raise as `build_method` does."""
    backbone = backbone_of(model)
    if (why := backbone.forward_only) and not issubclass(method, Source):
        raise ModelError(
            f"{why}, of which there are forward passes only, and this method needs gradients or layers; use the method "
            "fast, center, source or lame"
        )
    if config.bn == "recent" and (advice := backbone.advice_on_norms):
        tell_once(advice)
    created = method(AdaptedModel(model, config, method.trains, calls_module=method.calls_module), config)
    created.reset_learned()
    return created


@functools.cache
def tell_once(advice: str) -> None:
    """Log advice, but not again for each stream, method and seed."""
    _log.info("%s", advice)
