"""Save, load and apply deltas: what adaptation changed, as a small safetensors file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta._version import __version__
from remtta.backbones.batchnorm import batch_norms, running_statistics
from remtta.deltas import DELTA
from remtta.deltas.delta_files import FORMAT_VERSION, read_arrays
from remtta.deltas.tensor_files import save_tensors
from remtta.errors import DeltaError
from remtta.models.hashing import state_sha256
from remtta.models.inside import look_inside
from remtta.models.weights import check_delta
from remtta.models.zero_shot import checkpoint_state

ABSURD = 100.0
"""Size of a change over that of the weights, from which on no adaptation can have meant it."""

_log = logging.getLogger("remtta")


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
        lineage: What made it, on what, and of which deltas; empty where an older version wrote it.
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
    lineage: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None
    file_sha256: str | None = None

    @property
    def origin(self) -> dict[str, Any]:
        """Where it comes from, for the record of a run that starts from it."""
        names = ("path", "file_sha256", "method", "frames", "updates", "created")
        return {name: getattr(self, name) for name in names}

    def as_parent(self) -> dict[str, Any]:
        """What is told of it in the lineage of a delta that builds on it."""
        names = ("run", "source")
        own = {name: value for name, value in self.origin.items() if name != "path"}
        return {**own, **{name: self.lineage[name] for name in names if name in self.lineage}}


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
        **({"lineage": json.dumps(delta.lineage, sort_keys=True)} if delta.lineage else {}),
    }
    save_tensors(Path(path), delta.tensors, header)


def load_delta(path: str | Path) -> Delta:
    """Read a delta file, or the one in a run folder.

    Raises:
        DeltaError: If it is no safetensors file, lacks a header field, or
            holds a value that is not finite.
        UsageError: If there is no such file.
    """
    fields, arrays = read_arrays(Path(path, DELTA) if Path(path).is_dir() else Path(path))
    return Delta(tensors={name: torch.from_numpy(array) for name, array in arrays.items()}, **fields)


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


@torch.no_grad()
def apply_delta(model: nn.Module, delta: Delta) -> None:
    """Turn the base model into the adapted one, in place and bit for bit.

    Args:
        model: The model the delta was made on, with its source weights.
        delta: What to add.

    Raises:
        DeltaError: If the delta does not fit; the model is untouched then.
    """
    model = look_inside(model).module
    check_base(delta, state_sha256(model))
    parameters = {**dict(model.named_parameters()), **running_statistics(batch_norms(model))}
    check_delta(delta.tensors, parameters)
    change, own = (
        float(torch.nn.utils.get_total_norm([tensor.double().cpu() for tensor in tensors]))
        for tensors in (delta.tensors.values(), [parameters[name] for name in delta.tensors])
    )
    if change > ABSURD * own:
        times = change / max(own, 1e-9)
        _log.warning("the delta moves its weights by %.0e times their size: the run that made it diverged", times)
    for name, tensor in delta.tensors.items():
        parameter = parameters[name]
        parameter.copy_(parameter + tensor.to(parameter))


def save_weights(path: str | Path, model: nn.Module, base: Mapping[str, torch.dtype] | None = None) -> list[str]:
    """Write a model's whole state as a safetensors checkpoint, atomically.

    Args:
        path: Where to.
        model: The model; a zero-shot one is written as open_clip has it.
        base: Dtypes of the base checkpoint, by name; each tensor that its
            base dtype can hold without rounding is written in it.

    Returns:
        Names that had to keep the model's own, wider dtype.

    Raises:
        OutputError: If the disk refuses.
    """
    state, widened = {}, []
    for name, tensor in checkpoint_state(model).items():
        narrow = tensor.to((base or {}).get(name, tensor.dtype))
        exact = torch.equal(narrow.to(tensor.dtype), tensor)
        state[name] = (narrow if exact else tensor).detach().cpu().contiguous().clone()
        if not exact:
            widened.append(name)
    save_tensors(Path(path), state, {"format": "pt"}, checksum=False)  # for others, too
    return widened
