"""Tensors with a header of text in a safetensors file, written as a whole, with a checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from remtta.files import write_atomically
from remtta.models.hashing import tensors_sha256

CHECKSUM = "content_sha256"
"""Header entry with a hash over the tensors and the header's other entries."""

_MOST_HEADER_BYTES = 8 * 1024**2  # a hundred times that of a large model's

UNREADABLE = (SafetensorError, OSError, ValueError)
"""What reading raises of a file that is damaged, or none of these."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], *, checksum: bool = True) -> str:
    """Write tensors and their header atomically; returns the file's SHA-256.

    Args:
        path: The file.
        tensors: By name.
        header: Texts by name.
        checksum: Add one to the header, which `read_tensors` then goes by. Without it, a header of one entry makes
            the same bytes each time: safetensors writes several in any order.

    Raises:
        OutputError: If the disk refuses.
    """
    whole = {**header, **({CHECKSUM: _content_sha256(tensors, header)} if checksum else {})}
    # Not safetensors' own save_file: that makes files only their owner can read.
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=whole)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header, empty where there is none, and the tensors by name.

    Raises:
        SafetensorError, OSError, ValueError: One of `UNREADABLE`, for a file that is none, or whose content is not
            what its checksum says. A file without one is read as it is.
    """
    with open(path, "rb") as content:
        if int.from_bytes(content.read(8), "little") > _MOST_HEADER_BYTES:
            raise ValueError("its header is longer than that of any model")
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    if CHECKSUM in header and header[CHECKSUM] != _content_sha256(tensors, header):
        raise ValueError("its content does not match its checksum")
    return header, tensors


def _content_sha256(tensors: Mapping[str, Tensor], header: Mapping[str, str]) -> str:
    digest = hashlib.sha256(tensors_sha256(tensors).encode())
    for name in sorted(header.keys() - {CHECKSUM}):
        digest.update(f"\n{len(name)} {name} {header[name]}".encode())
    return digest.hexdigest()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
