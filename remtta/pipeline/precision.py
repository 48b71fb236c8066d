"""The precision of a method where it is "auto": decided by the processor and the kind of model, not by a measurement.

So the same command gives the same predictions at each start, also on a busy machine. Where bf16 pays was measured once
for each kind of model (docs/performance.md).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import nn

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE
from remtta.models.precision import is_compiled, multiplies_bf16

Resolved = Literal["fp32", "bf16"]

_log = logging.getLogger(__name__)


def recorded_precision(settings: Mapping[str, object]) -> Resolved:
    """Return the precision in a record of a method's settings; "auto", in those of earlier versions, was fp32."""
    return "bf16" if settings.get("precision") == "bf16" else "fp32"


def resolve_precision(method: Method[MethodConfig], name: str, chosen: Resolved | None = None) -> None:
    """Replace a method's precision "auto", before its first batch: by fp32 for a published method; for others by the
    one chosen before, or else by the faster one.
    """
    if method.config.precision != "auto":
        return
    precision: Resolved = "fp32"
    if METHOD_TABLE[name].preset.answer == "both":  # published methods predict by the adapted model alone
        precision = chosen or faster_precision(method.model)
    if precision == "bf16":
        _log_bf16()
    set_precision(method, precision)


@functools.cache  # once per process
def _log_bf16() -> None:
    _log.info("precision bf16, for which this processor has instructions; --precision fp32 is more exact")


def set_precision(method: Method[MethodConfig], precision: Resolved) -> None:
    """Let a method predict and learn in this precision from now on."""
    method.config = replace(method.config, precision=precision)
    method.model.use_precision(precision)


def faster_precision(model: AdaptedModel) -> Resolved:
    """Return bf16 if the device multiplies it, and the model gains from it: on a GPU any model, on a CPU one whose
    weights are mostly in linear layers, as a transformer's are.
    """
    module, device = model.backbone.module, model.device
    if not multiplies_bf16(device) or is_compiled(module):
        return "fp32"
    linear = sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))
    mostly_linear = 2 * linear > sum(parameter.numel() for parameter in module.parameters())
    return "bf16" if device.type == "cuda" or mostly_linear else "fp32"
