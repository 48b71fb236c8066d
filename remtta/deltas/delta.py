"""Save, load and apply deltas: what adaptation changed, as a small safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta._version import __version__
from remtta.deltas import DELTA
from remtta.deltas.tensor_files import UNREADABLE, file_sha256, read_tensors, save_tensors
from remtta.errors import DeltaError, UsageError
from remtta.models.config import UNKNOWN
from remtta.models.hashing import state_sha256
from remtta.models.loading import load_model
from remtta.models.weights import check_delta

FORMAT_VERSION = "1"

_REQUIRED = ("format_version", "remtta_version", "model", "base_sha256", "method", "frames", "updates", "created")


@dataclass(frozen=True)
class Delta:
    """Adapted minus source weights, and where they come from.

    Attributes:
        tensors: Parameter name to float32 difference.
        model: Name the base model was built by.
        base_sha256: Hash of the whole base state (`models.state_sha256`).
        method: Name of the adaptation method.
        hyperparameters: The method's settings.
        frames: Frames that entered an update.
        updates: Optimizer steps taken.
        model_options: What else it takes to build the base model.
        preprocessing: How its images became inputs (`Preprocessing.as_dict`).
        created: UTC time, ISO 8601.
        remtta_version: Version that wrote it.
        path: File it was read from, if it was.
        file_sha256: Hash of that file.
    """

    tensors: Mapping[str, Tensor]
    model: str
    base_sha256: str
    method: str
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    frames: int = 0
    updates: int = 0
    model_options: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    remtta_version: str = __version__
    path: str | None = None
    file_sha256: str | None = None

    @property
    def origin(self) -> dict[str, Any]:
        """Where it comes from, for the record of a run that starts from it."""
        names = ("path", "file_sha256", "method", "frames", "updates", "created")
        return {name: getattr(self, name) for name in names}


def save_delta(path: str | Path, delta: Delta) -> None:
    """Write a delta atomically.

    Raises:
        DeltaError: If a value is not finite; an earlier file stays.
        OutputError: If the disk refuses; an earlier file stays.
    """
    for name, tensor in delta.tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise DeltaError(f"the adapted {name} holds values that are not finite numbers; nothing was saved")
    header = {
        "format_version": FORMAT_VERSION,
        "remtta_version": delta.remtta_version,
        "model": delta.model,
        "model_options": json.dumps(delta.model_options, sort_keys=True),
        "preprocessing": json.dumps(delta.preprocessing, sort_keys=True),
        "base_sha256": delta.base_sha256,
        "method": delta.method,
        "hyperparameters": json.dumps(delta.hyperparameters, sort_keys=True),
        "frames": str(delta.frames),
        "updates": str(delta.updates),
        "created": delta.created,
    }
    save_tensors(Path(path), delta.tensors, header)


def load_delta(path: str | Path) -> Delta:
    """Read a delta file, or the one in a run folder.

    Raises:
        DeltaError: If it is no safetensors file, lacks a header field, or
            holds a value that is not finite.
        UsageError: If there is no such file.
    """
    if Path(path).is_dir():
        path = Path(path, DELTA)
    try:
        header, tensors = read_tensors(path)
        sha256 = file_sha256(path)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: no such delta file") from error
    except UNREADABLE as error:
        raise DeltaError(f"{path} is not a readable safetensors file: {error}") from error
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise DeltaError(f"{path} is not a remtta delta: its header lacks {', '.join(missing)}")
    if header["format_version"] != FORMAT_VERSION:
        raise DeltaError(
            f"{path} has delta format {header['format_version']}, this remtta reads {FORMAT_VERSION}; update remtta"
        )
    check_delta(tensors, tensors)
    try:
        return Delta(
            tensors=tensors,
            model=header["model"],
            base_sha256=header["base_sha256"],
            method=header["method"],
            hyperparameters=_mapping(header.get("hyperparameters", "{}")),
            frames=int(header["frames"]),
            updates=int(header["updates"]),
            model_options=_mapping(header.get("model_options", "{}")),
            preprocessing=_mapping(header.get("preprocessing", "{}")),
            created=header["created"],
            remtta_version=header["remtta_version"],
            path=str(path),
            file_sha256=sha256,
        )
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"{path} has a damaged header: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {text[:40]}")
    return content


def check_base(delta: Delta, base_sha256: str) -> None:
    """Refuse a delta that was made on other weights.

    Raises:
        DeltaError: If the hashes differ.
    """
    if delta.base_sha256 != base_sha256:
        raise DeltaError(
            f"the delta was made on other weights (base {delta.base_sha256[:12]}..., this model is "
            f"{base_sha256[:12]}...); load the {delta.model} checkpoint it was adapted from, with the same input size "
            "and model arguments"
        )


def base_arguments(delta: Delta, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of `load_model` that build the base a delta was made on, each replaced by what is given.

    Args:
        delta: The delta.
        given: Arguments of `load_model`; None, False or empty for the delta's own.

    Raises:
        DeltaError: If a model of another name is given.
        UsageError: If the delta was made on a checkpoint that is no longer where it was, and none is given.
    """
    chosen = arguments_given(given or {})
    if chosen.get("name") and not _may_be_same(chosen["name"], delta.model):
        raise DeltaError(f"the delta was made on {delta.model}, not on {chosen['name']}; leave --model out")
    if delta.model == UNKNOWN and not chosen.get("name"):
        raise UsageError("the delta was made on a model that load_model did not build; name an equal one with --model")
    preprocessing = {name: delta.preprocessing.get(name) for name in ("mean", "std", "interpolation", "crop_pct")}
    arguments = {**preprocessing, **delta.model_options, "name": delta.model, **chosen}
    checkpoint = arguments.get("checkpoint")
    if checkpoint and not chosen.get("checkpoint") and not Path(checkpoint).is_file():
        raise UsageError(f"the delta was made on {checkpoint}, which is not there; name that file with --checkpoint")
    return arguments_given(arguments)


def arguments_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those arguments of `load_model` that say something: not None, False or empty ones, but 0, which it refuses."""
    return {name: value for name, value in arguments.items() if value or (value == 0 and value is not False)}


def load_base(delta: Delta, **given: Any) -> nn.Module:
    """Load the model a delta was made on, its preprocessing included, ready for `apply_delta`.

    Args:
        delta: The delta.
        given: Arguments of `load_model` in place of the delta's, such as
            `checkpoint` if the file has moved.

    Raises:
        DeltaError: If a model of another name is given.
        UsageError: If its checkpoint is no longer where it was, and none is given.
    """
    return load_model(**base_arguments(delta, given))


def _may_be_same(first: str, second: str) -> bool:
    """Whether two names may stand for one architecture: folders, hubs and own models cannot be told by name."""
    return ":" in first + second or UNKNOWN in (first, second) or first.partition(".")[0] == second.partition(".")[0]


@torch.no_grad()
def apply_delta(model: nn.Module, delta: Delta) -> None:
    """Turn the base model into the adapted one, in place and bit for bit.

    Args:
        model: The timm model the delta was made on, with its source weights.
        delta: What to add.

    Raises:
        DeltaError: If the delta does not fit; the model is untouched then.
    """
    check_base(delta, state_sha256(model))
    parameters = dict(model.named_parameters())
    check_delta(delta.tensors, parameters)
    for name, tensor in delta.tensors.items():
        parameter = parameters[name]
        parameter.copy_(parameter + tensor.to(parameter))


def save_weights(path: str | Path, model: nn.Module, base: Mapping[str, torch.dtype] | None = None) -> list[str]:
    """Write a model's whole state as a safetensors checkpoint, atomically.

    Args:
        path: Where to.
        model: The model.
        base: Dtypes of the base checkpoint, by name; each tensor that its
            base dtype can hold without rounding is written in it.

    Returns:
        Names that had to keep the model's own, wider dtype.

    Raises:
        OutputError: If the disk refuses.
    """
    state, widened = {}, []
    for name, tensor in model.state_dict().items():
        narrow = tensor.to((base or {}).get(name, tensor.dtype))
        exact = torch.equal(narrow.to(tensor.dtype), tensor)
        state[name] = (narrow if exact else tensor).detach().cpu().contiguous().clone()
        if not exact:
            widened.append(name)
    save_tensors(Path(path), state, {"format": "pt"})
    return widened
