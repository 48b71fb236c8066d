"""Bring a file's weights into the layout of a timm model: without prefixes, by timm's own conversions."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from remtta.models.unwrapping import classifiers_of

Rules = Sequence[tuple[str, str]]
"""Patterns of names and their replacements, applied in sequence."""

TORCHVISION = re.compile(
    r"encoder\.layers\.encoder_layer_0\.ln_1\.weight$|features\.1\.0\.(?:attn\.relative_position_bias_table|layer_scale)$"
)
"""Matches one name of each family of torchvision that has other names than timm's: ViT, Swin and ConvNeXt."""

TRANSFORMERS = re.compile(r"\w+\.embeddings\.")
"""Matches names of transformers' models."""

_log = logging.getLogger(__name__)

_FACEBOOK = r"downsample_layers\."  # of the original ConvNeXt
_WITH_PREFIX = re.compile(rf"(.+\.)(?:{TORCHVISION.pattern}|{TRANSFORMERS.pattern}|{_FACEBOOK})")
COUNTER = ".num_batches_tracked"
"""Suffix of the counters of batch norms, which are unused where statistics are fixed."""

_IS_AVERAGED = re.compile("ema|teacher|averag|swa")  # a prefix of weights
_AVERAGED = "n_averaged"  # the counter of torch.optim.swa_utils.AveragedModel
_HEAD = re.compile(r"\w*(head|fc|classif|linear|logits)")  # a name of a classifier beside the rest
_MASK_TOKEN = re.compile(r"(^|\.)mask_token$")  # of pretraining
_KERNEL = "patch_embed.proj.weight"


def split_prefix(state: Mapping[str, Tensor], model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors under the best prefix, and those beside it, without these prefixes."""
    used = {name: tensor for name, tensor in state.items() if name != _AVERAGED}
    prefix = _prefix([*used], model.state_dict().keys())
    parent = prefix[: prefix[:-1].rfind(".") + 1]
    outside = {name.removeprefix(parent): tensor for name, tensor in used.items() if not name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in used.items() if name.startswith(prefix)}, outside


def _prefix(names: Sequence[str], known: Collection[str]) -> str:
    """Return the prefix behind which most names are known, or are of another library; else what all begin with."""
    starts = ((name, start) for name in names for start in (0, *(dot.end() for dot in re.finditer(r"\.", name))))
    found = Counter(name[:start] for name, start in starts if name[start:] in known)
    best = max(found, key=lambda prefix: (found[prefix], not _IS_AVERAGED.search(prefix), -len(prefix)), default="")
    if found[best] >= len(known) / 2:
        return best
    if match := next(filter(None, map(_WITH_PREFIX.match, names)), None):
        return match[1]
    common = os.path.commonprefix(names)  # noqa: RUF071 - cut at its last dot
    return "" if found[""] else common[: common.rfind(".") + 1]


def renamed(state: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Return the tensors under the names that the rules give; raise ValueError if two would have the same name."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"{new} occurs more than once, under different names")
        result[new] = tensor
    return result


def convert(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return weights in the layout of timm's model, by timm's own conversion if they are in another."""
    known = model.state_dict()
    bare = {name: tensor for name, tensor in state.items() if name in known or not _MASK_TOKEN.search(name)}
    wanted = {name: tensor.shape for name, tensor in known.items() if not name.endswith(COUNTER)}
    fits = {name: tensor.shape for name, tensor in bare.items() if not name.endswith(COUNTER)} == wanted
    kernel = state.get(_KERNEL)
    other_patches = kernel is not None and kernel.ndim == 4 and kernel.shape != known.get(_KERNEL, kernel).shape
    modules = (sys.modules[kind.__module__] for kind in type(model).__mro__)
    convert = next((module.checkpoint_filter_fn for module in modules if hasattr(module, "checkpoint_filter_fn")), None)
    if fits or other_patches or convert is None:  # timm would resize the weights of patches
        return bare
    config = getattr(model, "pretrained_cfg", None) or {}
    options = {"adapt_layer_scale": True, "antialias": config.get("pos_embed_antialias", True)}
    options = {name: options[name] for name in options.keys() & inspect.signature(convert).parameters.keys()}
    given = dict(state)
    if "register_tokens" in given:
        given["mask_token"] = given["register_tokens"]  # by which timm recognises DINOv2, and drops it
    if "pos_embed" in given and given["pos_embed"].is_floating_point():
        given["pos_embed"] = given["pos_embed"].float()  # added to and resized without rounding
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):  # that of EVA prints
            converted = convert(given, model, **options)
    except Exception as error:  # whatever timm's conversions raise at other models' weights, which are reported later
        _log.debug("timm's conversion failed: %s: %s", type(error).__name__, error)
        return bare
    made, embed = converted.get("pos_embed"), known.get("pos_embed")
    if made is not None and embed is not None and made.shape[:2] != embed.shape[:2]:
        converted["pos_embed"] = state["pos_embed"]  # no square, which timm takes it for
    return {name: tensor for name, tensor in converted.items() if name in known or not _MASK_TOKEN.search(name)}


def outer_heads(state: Collection[str], outside: Collection[str], model: nn.Module) -> dict[str, str]:
    """Return the model's names of its classifier's weights, where the file has them beside the others, by their own.

    They have the model's names there, or are the only linear layer that is named like a classifier.
    """
    paths = [*classifiers_of(model)]
    missing = [name for name in model.state_dict() if name.startswith(tuple(paths)) and name not in state]
    if native := [name for name in outside if name in missing]:
        return {name: name for name in native}
    found = [name for name in outside if _HEAD.match(name)] if missing and len(paths) == 1 else []
    one = len({name.rpartition(".")[0] for name in found}) == 1
    return {name: f"{paths[0]}.{name.rpartition('.')[2]}" for name in found} if one else {}
