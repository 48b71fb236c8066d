"""Where a run is, with the tensors its next update depends on: one file, replaced as a whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.errors import RemttaError
from remtta.tensor_files import UNREADABLE, read_tensors, save_tensors

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
    save_tensors(path, tensors, header)


def load_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what `save_state` wrote.

    Raises:
        RemttaError: If the file is damaged.
    """
    try:
        header, tensors = read_tensors(path)
        position = json.loads(header[_POSITION])
        if not isinstance(position, dict):
            raise ValueError("it holds no position")
    except (*UNREADABLE, KeyError, RecursionError) as error:
        raise RemttaError(f"{path} is damaged ({error}); start again with --overwrite") from error
    return position, tensors
