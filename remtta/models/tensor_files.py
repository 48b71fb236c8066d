"""Tensors with a text header in a safetensors file, written atomically, with a checksum.

Torch is imported only when there are tensors.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from remtta.files import write_atomically
from remtta.models.hashing import tensors_sha256

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUM = "content_sha256"
"""Header entry: a hash of the tensors and the other header entries."""

UNREADABLE = (SafetensorError, OSError, ValueError)
"""Exceptions raised on reading a file that is damaged or not a safetensors file."""

_MAX_HEADER_BYTES = 8 * 1024**2  # a hundred times a large model's


def save_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], *, checksum: bool = True) -> str:
    """Write tensors and their header atomically; return the file's SHA-256.

    `read_tensors` verifies the checksum added to the header. Without it, a header of one entry gives the same bytes
    each time; safetensors writes several entries in arbitrary order.

    Raises:
        OutputError: If the file cannot be written.
    """
    from safetensors.torch import save

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


def check_header_size(path: str | Path) -> None:
    """Raise one of `UNREADABLE` if a file's header is longer than that of any model, before reading it."""
    if Path(path).exists() and not Path(path).is_file():  # a device may be endless
        raise OSError(errno.EINVAL, "it is not a regular file")
    with open(path, "rb") as content:
        num_bytes = int.from_bytes(content.read(8), "little")
    if num_bytes > _MAX_HEADER_BYTES:
        raise ValueError("its header is too long")


def check_content(header: Mapping[str, str], sha256: str) -> None:
    """Raise ValueError, one of `UNREADABLE`, if the header has a checksum that does not match the tensors."""
    if CHECKSUM in header and header[CHECKSUM] != content_sha256(header, sha256):
        raise ValueError("its content does not match its checksum")


def content_sha256(header: Mapping[str, str], sha256: str) -> str:
    """Return a checksum of the tensors' hash and the other header entries."""
    digest = hashlib.sha256(sha256.encode())
    for name in sorted(header.keys() - {CHECKSUM}):
        digest.update(f"\n{len(name)} {name} {header[name]}".encode())
    return digest.hexdigest()
