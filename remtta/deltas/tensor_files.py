"""Tensors with a header of text in a safetensors file, written as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from remtta.files import write_atomically

UNREADABLE = (SafetensorError, OSError, ValueError)
"""What reading raises of a file that is damaged, or none of these."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> str:
    """Write tensors and their header atomically; returns the file's SHA-256.

    Raises:
        OutputError: If the disk refuses.
    """
    # Not safetensors' own save_file: that makes files only their owner can read.
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=header)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header, empty where there is none, and the tensors by name; raises one of `UNREADABLE` else."""
    with safe_open(path, framework="pt") as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
