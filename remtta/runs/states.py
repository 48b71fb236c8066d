"""Where a run is, with the tensors its next update depends on: one file, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from remtta.deltas.delta_files import UNREADABLE
from remtta.deltas.tensor_files import read_tensors, save_tensors
from remtta.errors import DeltaError, RemttaError, UsageError
from remtta.runs.removed import kept_tensors

_POSITION = "position"


class Stateful(Protocol):
    """A method, alone or with its observers."""

    def state(self) -> dict[str, Tensor]: ...
    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


def save_state(path: Path, position: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a position and a method's state atomically.

    Args:
        path: The safetensors file.
        position: Anything that JSON can hold.
        tensors: As from a method's `state()`.

    Raises:
        OutputError: If the disk refuses.
    """
    header = {_POSITION: json.dumps(position, allow_nan=False)}
    save_tensors(path, tensors, header)


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_state` wrote.

    Raises:
        UsageError: If the file is damaged, or of a run that used what was removed since.
        RemttaError: If it cannot be read.
    """
    try:
        header, tensors = read_tensors(path)
        position = json.loads(header[_POSITION])
        if not isinstance(position, dict):
            raise ValueError("it holds no position")
    except OSError as error:
        raise RemttaError(f"{path} cannot be read: {error.strerror or error}") from error
    except (*UNREADABLE, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error
    return position, kept_tensors(path, tensors)


def take_back(path: Path, state: Mapping[str, Tensor], owner: Stateful) -> None:
    """Have a method go on from the state that a file held.

    Raises:
        UsageError: If it holds more, less or something else than would be saved.
    """
    try:
        load_whole(state, owner)
    except ValueError as error:
        raise other_version(path) from error


def load_whole(state: Mapping[str, Tensor], owner: Stateful) -> None:
    """Have a method go on from a state.

    Raises:
        ValueError: If it holds more, less or something else than the method's own.
    """
    try:
        owner.load_state(state)
        names = owner.state().keys()
    except torch.OutOfMemoryError:
        raise
    except (DeltaError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the state is of something else: {error}") from error
    if names != state.keys():
        raise ValueError(f"the state has {', '.join(sorted(names ^ state.keys())[:3])}, or lacks it")


def other_version(path: Path) -> UsageError:
    """What to raise of a state that is whole, but not as this version writes it."""
    return UsageError(
        f"the state in {path.parent} was written by another version of remtta; start again with --overwrite"
    )
