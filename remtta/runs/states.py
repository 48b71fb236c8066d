"""Save and load a position with the tensors of a method's state, in one file that is replaced atomically."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from remtta.errors import DeltaError, RemttaError, UsageError
from remtta.models.tensor_files import UNREADABLE, read_tensors, save_tensors
from remtta.pipeline.pipeline import Pipeline

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_POSITION = "position"

P = TypeVar("P", bound="DataclassInstance")


def save_state(path: Path, position: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Save a position, in the terms of JSON, and a method's state, atomically; raise OutputError if that fails."""
    save_tensors(path, tensors, {_POSITION: json.dumps(position, allow_nan=False)})


def load_position(path: Path, kind: type[P]) -> tuple[P, dict[str, Tensor]]:
    """Load a position of a dataclass, and the state; both are empty if nothing was saved yet. Raise UsageError if the
    file is damaged or of another version; RemttaError if it cannot be read.
    """
    if not path.exists():
        return kind(), {}
    try:
        header, state = read_tensors(path)
        position = json.loads(header[_POSITION])
        if not isinstance(position, dict):
            raise ValueError("it holds no position")
    except OSError as error:
        raise RemttaError(f"{path} cannot be read: {error.strerror or error}") from error
    except (*UNREADABLE, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error
    if set(position) != {field.name for field in fields(kind)}:
        raise other_version(path)
    return kind(**position), state


def load_whole(state: Mapping[str, Tensor], pipeline: Pipeline) -> None:
    """Load a state into a pipeline; raise ValueError if it is not exactly what the pipeline would save."""
    try:
        pipeline.load_state_dict(state)
        names = pipeline.state_dict().keys()
    except torch.OutOfMemoryError:
        raise
    except (DeltaError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the state does not fit: {error}") from error
    if names != state.keys():
        raise ValueError(f"the state has {', '.join(sorted(names ^ state.keys())[:3])}, or lacks it")


def other_version(path: Path) -> UsageError:
    """Return the error for a state that is undamaged, but not of this version."""
    return UsageError(
        f"the state in {path.parent} was written by another version of remtta; start again with --overwrite"
    )
