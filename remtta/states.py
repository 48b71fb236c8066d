"""Where a run is, with the tensors its next update depends on: one file, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from remtta.errors import RemttaError
from remtta.files import write_atomically

_POSITION = "position"


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
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_state` wrote.

    Raises:
        RemttaError: If the file is damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            position = json.loads((file.metadata() or {})[_POSITION])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        if not isinstance(position, dict):
            raise ValueError("it holds no position")
    except (SafetensorError, OSError, ValueError, KeyError, RecursionError) as error:
        raise RemttaError(f"{path} is damaged ({error}); start again with --overwrite") from error
    return position, tensors
