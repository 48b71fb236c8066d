"""Read and validate delta files; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remtta.deltas import DELTA
from remtta.errors import DeltaError, UsageError, listed
from remtta.models.tensor_files import UNREADABLE, file_sha256, read_tensors

FORMAT_VERSION = "1"
TEXTS, NUMBERS = ("model", "base_sha256", "method", "created", "remtta_version"), ("frames", "updates")
MAPPINGS = ("hyperparameters", "model_options", "preprocessing")
"""Fields of a `Delta` in a file's header; mappings are stored as JSON."""

_MAX_NAMED = 5
_REQUIRED = ("format_version", "remtta_version", "model", "base_sha256", "method", "frames", "updates", "created")


def delta_file(path: Path) -> Path:
    """Return the delta at a path, or in the run folder there; raise UsageError if there is none."""
    file = path / DELTA if path.is_dir() else path
    if not file.exists():
        hint = "; a run that learns nothing has none" if path.is_dir() else ""
        # Many streams, a demo or an evaluation have deltas in subfolders.
        others = (*file.parent.glob(f"*/{DELTA}"), *file.parent.glob("deltas/*.safetensors"))
        if folders := sorted({str(other.parent) for other in others}):
            hint = f"; there are deltas in {listed(folders, _MAX_NAMED)}"
        raise UsageError(f"{file}: no such delta file{hint}")
    return file


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the fields of a delta except its tensors, and the tensors as finite arrays by name; see `delta_file`.
    Raise DeltaError if it is not a safetensors file, lacks a header field, or holds a value that is not finite;
    UsageError if the file does not exist.
    """
    path = delta_file(path)
    try:
        (header, arrays), sha256 = read_tensors(path, "np"), file_sha256(path)
    except UNREADABLE as error:
        raise DeltaError(f"{path} is not a readable safetensors file: {error}") from error
    fields = _fields(path, header)
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise DeltaError(f"the delta's {name} is of type {array.dtype}, not a float")
        if not np.isfinite(array).all():
            raise DeltaError(f"the delta's {name} holds values that are not finite numbers")
    return {**fields, "path": str(path), "file_sha256": sha256}, arrays


def _fields(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of a `Delta` except its tensors, from a file's header; raise DeltaError if one is missing."""
    if missing := [name for name in _REQUIRED if name not in header]:
        raise DeltaError(f"{path} is not a remtta delta: its header lacks {', '.join(missing)}")
    if header["format_version"] != FORMAT_VERSION:
        raise DeltaError(
            f"{path} has delta format {header['format_version']}, this remtta reads {FORMAT_VERSION}; update remtta"
        )
    try:
        return {
            **{name: header[name] for name in TEXTS},
            **{name: int(header[name]) for name in NUMBERS},
            **{name: _mapping(header.get(name, "{}")) for name in MAPPINGS},
        }
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"{path} has a damaged header: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a JSON object, got {text[:40]}")
    return content
