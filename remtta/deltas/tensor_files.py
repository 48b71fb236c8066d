"""Tensors with a text header in a safetensors file, written atomically, with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from remtta.deltas.delta_files import CHECKSUM, check_content, check_header_size, content_sha256
from remtta.files import write_atomically
from remtta.models.hashing import tensors_sha256


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], *, checksum: bool = True) -> str:
    """Write tensors and their header atomically; return the file's SHA-256.

    `read_tensors` verifies the checksum added to the header. Without it, a header of one entry gives the same bytes
    each time; safetensors writes several entries in arbitrary order.

    Raises:
        OutputError: If the file cannot be written.
    """
    whole = {**header, **({CHECKSUM: content_sha256(header, tensors_sha256(tensors))} if checksum else {})}
    # safetensors' own save_file makes files that only their owner can read.
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=whole)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the header, empty if there is none, and the tensors by name.

    Raises:
        SafetensorError, OSError, ValueError: Members of `UNREADABLE`, if the file is malformed or its content does not
            match its checksum. A file without a checksum is not verified.
    """
    check_header_size(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if CHECKSUM in header:
        check_content(header, tensors_sha256(tensors))
    return header, tensors


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
