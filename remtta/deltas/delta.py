"""Save, load and apply deltas: the weight changes of an adaptation, as a small safetensors file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor, nn

from remtta._version import __version__
from remtta.backbones.batchnorm import batch_norms, running_statistics
from remtta.deltas.delta_files import FORMAT_VERSION, MAPPINGS, NUMBERS, TEXTS, read_arrays
from remtta.errors import DeltaError, UsageError
from remtta.files import as_path
from remtta.models.info import UNKNOWN
from remtta.models.metadata import ModelWithMetadata, Output
from remtta.models.preprocessing import Preprocessing
from remtta.models.tensor_files import save_tensors, state_sha256
from remtta.models.unwrapping import custom_head, unwrap_model
from remtta.models.weights import check_delta

ABSURD = 100.0
"""A run whose change of weights has more than this many times their norm has diverged."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delta:
    """Adapted minus source weights, and their origin.

    Attributes:
        tensors: Float32 difference by the name of a parameter, or of running statistics of batch norms.
        model: Name from which the base model was built.
        base_sha256: Hash of the whole base state (`models.state_sha256`).
        method: Name of the adaptation method.
        hyperparameters: The method's settings.
        frames: Frames used in updates.
        updates: Optimizer steps taken.
        model_options: Other options needed to build the base model.
        preprocessing: Preprocessing of its images (`Preprocessing.as_dict`).
        created: UTC time, ISO 8601.
        remtta_version: Version that wrote it.
        path: File from which it was read, if any.
        file_sha256: Hash of that file.
    """

    tensors: Mapping[str, Tensor]
    model: str
    base_sha256: str
    method: str
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    frames: int = 0
    updates: int = 0
    model_options: Mapping[str, object] = field(default_factory=dict)
    preprocessing: Mapping[str, object] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    remtta_version: str = __version__
    path: str | None = None
    file_sha256: str | None = None

    @property
    def origin(self) -> dict[str, object]:
        """The delta's origin, for `run.json` of a run that starts from it."""
        names = ("path", "file_sha256", "method", "frames", "updates", "created")
        return {name: getattr(self, name) for name in names}


def save_delta(path: str | Path, delta: Delta, *, overwrite: bool = True) -> None:
    """Write a delta atomically.

    Raises:
        UsageError: If it is not a Delta, or the file exists and `overwrite` is False.
        DeltaError: If a value is not finite; an existing file is kept.
        OutputError: If the file cannot be written; an existing file is kept.
    """
    if not isinstance(delta, Delta):
        raise UsageError(
            f"a delta is a remtta.Delta, got {type(delta).__name__}; to save an Adapter's, use its save_delta"
        )
    file = as_path(path, "the file of a delta")
    if not overwrite and file.exists():
        raise UsageError(f"{path} exists; choose another file, or leave out overwrite=False")
    for name, tensor in delta.tensors.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise DeltaError(f"the adapted {name} holds values that are not finite numbers; nothing was saved")
    header = {
        "format_version": FORMAT_VERSION,
        **{name: str(getattr(delta, name)) for name in (*TEXTS, *NUMBERS)},
        **{name: json.dumps(getattr(delta, name), sort_keys=True) for name in MAPPINGS},
    }
    save_tensors(file, delta.tensors, header)


def load_delta(path: str | Path) -> Delta:
    """Read a delta file, or the one in a run folder.

    Raises:
        DeltaError: If it is not a safetensors file, lacks a header field, or holds a value that is not finite.
        UsageError: If the file does not exist.
    """
    fields, arrays = read_arrays(as_path(path, "the file of a delta"))
    return Delta(tensors={name: torch.from_numpy(array) for name, array in arrays.items()}, **fields)


def check_base(delta: Delta, base_sha256: str) -> None:
    """Raise DeltaError if a delta was made on other weights, UsageError if it is not a Delta."""
    if not isinstance(delta, Delta):
        got = type(delta).__name__
        raise UsageError(
            f"a delta is what remtta.load_delta returns, got {got}; to continue an Adapter, use load_state_dict"
        )
    if delta.base_sha256 != base_sha256:
        named = "weights" if delta.model == UNKNOWN else f"{delta.model} checkpoint"
        usual = ("checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size")
        others = [
            name.replace("_", " ") for name, value in sorted(delta.model_options.items()) if value and name not in usual
        ]
        same = ", ".join([*others, "input size and model arguments"])
        raise DeltaError(
            f"the delta was made on other weights (base {delta.base_sha256[:12]}..., this model is "
            f"{base_sha256[:12]}...); load the {named} it was adapted from, with the same {same}"
        )


@torch.no_grad()
def apply_delta(
    model: nn.Module, delta: Delta, *, output: Output | None = None, preprocessing: Preprocessing | None = None
) -> None:
    """Turn the model on which a delta was made into the adapted one, in place and bit for bit.

    Args:
        model: The model, at its source weights.
        delta: The delta.
        output: The `output` argument of its `Adapter`, if any.
        preprocessing: The `preprocessing` argument of its `Adapter`, if any; only the input size matters.

    Raises:
        DeltaError: If the delta does not fit; the model is then unchanged.
    """
    model = unwrap_model(ModelWithMetadata(model, output, preprocessing=preprocessing)).module
    check_base(delta, state_sha256(model))
    parameters = {**dict(model.named_parameters()), **running_statistics(batch_norms(model))}
    check_delta(delta.tensors, parameters)
    weights = [name for name in delta.tensors if not name.endswith("bias")]  # a head's bias may be near 0
    change_norm, weight_norm = (
        float(torch.nn.utils.get_total_norm([tensors[name].cpu().double() for name in weights]))
        for tensors in (delta.tensors, parameters)
    )
    if change_norm > ABSURD * weight_norm:
        times = change_norm / max(weight_norm, 1e-9)
        _log.warning("the delta moves its weights by %.0e times their size: the run that made it diverged", times)
    for name, tensor in delta.tensors.items():
        parameter = parameters[name]
        parameter.copy_(parameter + tensor.to(parameter))


def checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole state of a model in the layout of the checkpoints that build it, which a custom head knows."""
    state: dict[str, Tensor] = model.state_dict()
    if (found := custom_head(model)) is None:
        return state
    path, head = found
    return head.checkpoint_state(state, path)


def save_weights(path: str | Path, model: nn.Module, base: Mapping[str, torch.dtype] | None = None) -> list[str]:
    """Write a model's whole state as a safetensors checkpoint, atomically, in the layout of its custom head, if any.

    Each tensor is stored with its dtype in the base checkpoint (`base`, by name) if that needs no rounding, otherwise
    with the model's wider one; return the names of the latter. Raise OutputError if the file cannot be written.
    """
    state, widened = {}, []
    for name, tensor in checkpoint_state(model).items():
        narrow = tensor.to((base or {}).get(name, tensor.dtype))
        exact = torch.equal(narrow.to(tensor.dtype), tensor)
        state[name] = (narrow if exact else tensor).detach().cpu().contiguous().clone()
        if not exact:
            widened.append(name)
    save_tensors(Path(path), state, {"format": "pt"}, checksum=False)  # no checksum, for other readers
    return widened
