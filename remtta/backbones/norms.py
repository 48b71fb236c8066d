"""The norm parameters that adapt, found by module type, never by parameter name."""

from __future__ import annotations

import math
import re

from torch import nn

from remtta.backbones.backbone import Backbone, BatchNorm
from remtta.errors import ModelError, UsageError, counted

_NORM_NAMES = re.compile(r"(Layer|RMS|Batch|Group|Instance)Norm")
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, BatchNorm)
_TIMM_NORMS = "timm.layers.norm"  # the module of timm's, which is not imported here, as that takes seconds


def adapted_norms(backbone: Backbone, adapt_layers: str | None = None) -> dict[str, nn.Parameter]:
    """Return the norm parameters that adapt by name (as in `backbone.module.named_parameters()`), in model order. Raise
    ModelError if nothing is left to adapt; UsageError if the selection cannot be parsed, or names a block that does not
    exist.
    """
    if not norm_modules(backbone.module):
        raise ModelError(
            f"nothing to adapt: {type(backbone.module).__name__} has no normalisation layers{_hint(backbone)}; "
            "the method fast centers its logits and trains nothing"
        )
    depth = len(backbone.blocks)
    if adapt_layers == "auto":
        adapt_layers = "all" if backbone.batch_norms or depth < 2 else None
    if adapt_layers == "all":
        roots = [backbone.module]
    else:
        chosen = _block_numbers(adapt_layers, depth) if adapt_layers is not None else range(math.floor(0.75 * depth))
        roots = [part for number in chosen for part in backbone.parts(number)]
        if not roots:
            raise ModelError(
                f"nothing to adapt: the first three quarters of {counted(depth, 'block')} hold no whole block; "
                "name the blocks with --adapt-layers, or all"
            )
    norms = [module for root in roots for module in norm_modules(root).values()]
    chosen_ids = {id(parameter) for module in norms for parameter in module.parameters(recurse=False)}
    named = backbone.module.named_parameters()
    selected = {name: parameter for name, parameter in named if id(parameter) in chosen_ids}
    if not selected:
        raise ModelError(f"nothing to adapt: the chosen blocks have no normalisation weights{_hint(backbone)}")
    return selected


def norm_modules(module: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in module.named_modules() if is_norm(layer)}


def is_norm(layer: nn.Module) -> bool:
    """Return whether a layer normalises: by its type in torch or timm, or by the name of its class."""
    if isinstance(layer, _NORMS) or any(base.__module__ == _TIMM_NORMS for base in type(layer).__mro__):
        return True
    return bool(_NORM_NAMES.search(type(layer).__name__)) and isinstance(getattr(layer, "weight", None), nn.Parameter)


def _hint(backbone: Backbone) -> str:
    layers = list(backbone.module.modules())
    if frozen := sum("FrozenBatchNorm" in type(layer).__name__ for layer in layers):
        return f"; {frozen} batch norms of the model are frozen: load it with batch norms that train"
    if sum(isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) for layer in layers) > 1:
        return "; if its batch norms were folded into convolutions, load the model from before that"
    return ""


def _block_numbers(text: str, depth: int) -> list[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise UsageError(
                f'cannot read the adapted layers "{text[:40]}"; write "all", "auto" or block numbers such as "0-8"'
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= depth:
            raise UsageError(f"no block {last if first <= last else part.strip()}: the model has blocks 0-{depth - 1}")
        numbers.update(range(first, last + 1))
    return sorted(numbers)
