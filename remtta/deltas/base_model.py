"""Rebuild the model on which a delta was made, using only safe values of the delta's header.

People share deltas, so the header is not trusted: it may set sizes of an architecture, within bounds, but cannot cause
anything to be downloaded, opened or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.deltas.delta import Delta
from remtta.errors import DeltaError, UsageError
from remtta.files import from_json
from remtta.models.info import UNKNOWN
from remtta.models.loading import load
from remtta.models.preprocessing import check_preprocessing
from remtta.options import ModelOptions
from remtta.options.loaders import is_model_file, is_safe, own_options
from remtta.options.model import WEIGHT_SUFFIXES

_OPTIONS = ("checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "labels")
_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
_ARGUMENTS = (
    *("img_size", "patch_size", "num_classes", "in_chans", "embed_dim", "depth", "num_heads", "mlp_ratio"),
    *("init_values", "reg_tokens", "class_token", "qkv_bias", "qk_norm", "pre_norm", "fc_norm", "final_norm"),
    *("no_embed_class", "dynamic_img_size", "dynamic_img_pad"),
)
"""Model arguments that a header may set: numbers up to a bound, and booleans."""
_MAX_NUMBER, _MAX_CLASSES = 16_384, 1_000_000
_POOLS = ("", "avg", "avgmax", "max", "token", "map")


def base_options(delta: Delta, overrides: ModelOptions | None = None) -> ModelOptions:
    """Return the options that build the model on which a delta was made.

    If the delta was read from a file, only safe values are used: the sizes of the model and, in a run's folder, the
    checkpoint named in its `run.json`. Raise DeltaError if the overrides name another model, or the header sets
    something it must not; UsageError if the user has to name the base: it is another file, a download, or a model that
    `load_model` did not build.

    Args:
        delta: The delta.
        overrides: Options to use instead; None, False or empty values keep the delta's.
    """
    given = vars(overrides or ModelOptions())
    chosen = _only_set({**given, **given["own"], "own": None})
    if chosen.get("name") and not _may_be_same(chosen["name"], delta.model):
        raise DeltaError(f"the delta was made on {delta.model}, not on {chosen['name']}; leave --model out")
    if delta.model == UNKNOWN and not chosen.get("name"):
        raise UsageError(
            "the delta was made on a model that load_model did not build; name an equal one with --model, or call "
            "remtta.apply_delta(model, delta) in Python"
        )
    preprocessing = {name: delta.preprocessing.get(name) for name in _PREPROCESSING}
    header = delta.model_options if delta.path is None else _safe_options(delta, chosen)
    options = ModelOptions.from_arguments(**_only_set({**preprocessing, **header, "name": delta.model, **chosen}))
    if options.checkpoint and not chosen.get("checkpoint") and not Path(options.checkpoint).is_file():
        raise UsageError(
            f"the delta was made on {options.checkpoint}, which is not there; name that file with --checkpoint"
        )
    return options


def _only_set(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not None, False or empty; 0 is kept, for `load_model` to reject."""
    return {name: value for name, value in arguments.items() if value or (value == 0 and value is not False)}


def load_base(delta: Delta, *, device: str | torch.device = "cpu", **overrides: Any) -> nn.Module:
    """Load the model on which a delta was made, including its preprocessing, ready for `apply_delta`.

    Arguments of `load_model` override the delta's, e.g. `checkpoint` for a delta without its run folder, or `name` to
    allow a download.

    Raises:
        DeltaError: If a model of another name is given, or the header sets something it must not.
        UsageError: If the user has to name the base.
    """
    return load(base_options(delta, ModelOptions.from_arguments(**overrides)), device=device)


def _safe_options(delta: Delta, chosen: Mapping[str, object]) -> dict[str, object]:
    """Return the options that may be taken from a header, where the user has chosen some."""
    _check_header(delta, chosen)
    options = delta.model_options
    checkpoint = chosen.get("checkpoint") or _recorded_checkpoint(delta)
    if options.get("checkpoint") and not checkpoint:
        raise UsageError(
            f"the delta was made on the weights in {str(options['checkpoint'])[:200]!r}; name them with "
            f"{'--model' if is_model_file(delta.model) else '--checkpoint'}, since remtta opens no file that a header "
            "names"
        )
    if ":" in delta.model and not chosen.get("name"):
        raise UsageError(f"the delta was made on {delta.model[:200]!r}; add --model to allow it to be loaded")
    if not (checkpoint or chosen.get("name") or ModelOptions(delta.model).loader.is_bundled):
        raise UsageError(
            f"the delta was made on the published weights of {delta.model[:200]}; add --model to allow their download, "
            "or name the file with --checkpoint"
        )
    for name in options.keys() - {*_OPTIONS, *chosen}:
        if options[name] is not None and not is_safe(name, options[name]):
            value, flag = str(options[name])[:80], f"--{name.replace('_', '-')}"
            raise UsageError(f"the delta was made with {flag} {value!r}, which a file may not set; name it with {flag}")
    return {**options, "checkpoint": checkpoint, "use_ema": options.get("use_ema") is True}


def _check_header(delta: Delta, chosen: Mapping[str, object]) -> None:
    """Raise DeltaError if a header holds something that remtta never writes, or model arguments that are not safe."""
    options = delta.model_options
    known = {*_OPTIONS, *(each.name for each in fields(own_options()))}
    if (strange := sorted(options.keys() - known)) or not delta.model:
        what = f"unknown model options: {', '.join(strange)}" if strange else "no model"
        raise DeltaError(f"the delta's header holds {what}; it was not made by remtta")
    kwargs = options.get("model_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise DeltaError("the delta's header holds model arguments that are not a mapping")
    refused = sorted(name for name, value in kwargs.items() if not _is_safe_argument(name, value))
    if refused and not chosen.get("model_kwargs"):
        raise DeltaError(
            f"the delta's header asks for model arguments that a file may not set: {', '.join(refused)[:80]}; "
            "if you trust them, name all with --model-kwargs"
        )
    classes, size, labels = options.get("num_classes"), options.get("input_size"), options.get("labels")
    if not (labels is None or (isinstance(labels, list) and all(isinstance(label, str) for label in labels))):
        raise DeltaError("the delta's header holds class names that are not text")
    if not (isinstance(classes, int | None) and _is_safe_argument("num_classes", classes)):
        raise DeltaError("the delta's header asks for an absurd number of classes; it was refused")
    sides: Any = [1, 1] if size is None else size
    is_pair = isinstance(sides, list | tuple) and len(sides) == 2
    if not (is_pair and all(type(side) is int and 0 < side <= _MAX_NUMBER for side in sides)):
        raise DeltaError("the delta's header asks for an absurd input size; it was refused")
    preprocessing: dict[str, Any] = {name: delta.preprocessing.get(name) for name in _PREPROCESSING}
    try:
        check_preprocessing(**preprocessing)
    except (UsageError, TypeError, ValueError) as error:
        raise DeltaError(f"the delta's header has invalid preprocessing: {error}") from error


def _is_safe_argument(name: str, value: object) -> bool:
    """Return whether a header may set this model argument to this value."""
    if name == "global_pool":
        return value in _POOLS
    if name not in _ARGUMENTS:
        return False
    largest = _MAX_CLASSES if name == "num_classes" else _MAX_NUMBER
    values = value if isinstance(value, (list, tuple)) else [value]
    return len(values) <= 2 and all(
        item is None or (isinstance(item, (bool, int, float)) and 0 <= item <= largest) for item in values
    )


def _recorded_checkpoint(delta: Delta) -> str | None:
    """Return the checkpoint in the `run.json` beside a delta, if that file describes its run."""
    assert delta.path is not None
    try:
        model = from_json(Path(delta.path).with_name("run.json").read_text(encoding="utf-8"))["model"]
        checkpoint, base_sha256 = model["checkpoint"], model["base_sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    if not isinstance(checkpoint, str) or "://" in checkpoint or base_sha256 != delta.base_sha256:
        return None
    return checkpoint if checkpoint.lower().endswith(WEIGHT_SUFFIXES) or is_model_file(checkpoint) else None


def _may_be_same(first: str, second: str) -> bool:
    """Return whether two names may be of one architecture; unknown for names of folders, hubs and custom models."""
    if is_model_file(first) and is_model_file(second):  # its hash says whether it is
        return True
    return ":" in first + second or UNKNOWN in (first, second) or _architecture(first) == _architecture(second)


def _architecture(name: str) -> str:
    from remtta.models.building import current_name  # loads timm, which an ONNX file does without

    return current_name(name).partition(".")[0]
