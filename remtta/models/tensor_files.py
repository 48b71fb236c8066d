"""Tensors with a text header in a safetensors file, atomic and with a checksum; hashes of tensors, JSON and files.

torch is imported only when there are tensors.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from remtta.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor, nn

CHECKSUM = "content_sha256"
"""Header entry: a hash of the tensors and the other header entries."""

UNREADABLE = (SafetensorError, OSError, ValueError)
"""Exceptions raised on reading a file that is damaged or not a safetensors file."""

_MAX_HEADER_BYTES = 2**22  # for 60,000 tensors, more than any model has


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str], *, checksum: bool = True
) -> None:
    """Write tensors and their header atomically.

    `read_tensors` verifies the checksum added to the header. Without it, a header of one entry gives the same bytes
    each time; safetensors writes several entries in arbitrary order. Raise OutputError if the file cannot be written.
    """
    from safetensors.torch import save

    whole = {**header, **({CHECKSUM: content_sha256(header, tensors_sha256(tensors))} if checksum else {})}
    # safetensors' own save_file makes files that only their owner can read.
    content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=whole)
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def read_tensors(path: str | Path, framework: Literal["pt", "np"] = "pt") -> tuple[dict[str, str], dict[str, Any]]:
    """Return the header, empty if there is none, and the tensors by name, as those of torch or as NumPy's arrays.

    Raises:
        SafetensorError, OSError, ValueError: Members of `UNREADABLE`, if the file is malformed, its content does not
            match its checksum, or NumPy has no such type. A file without a checksum is not verified.
    """
    if Path(path).exists() and not Path(path).is_file():  # a device may be endless
        raise OSError(errno.EINVAL, "it is not a regular file")
    if framework == "pt" and any("\udc80" <= sign <= "\udcff" for sign in str(path)):  # safetensors cannot open it
        raise OSError(errno.EINVAL, "its path is not valid UTF-8; rename it")
    with open(path, "rb") as content:
        header_bytes = int.from_bytes(content.read(8), "little")
    if _MAX_HEADER_BYTES < header_bytes < Path(path).stat().st_size:  # else safetensors says what is wrong
        raise ValueError(f"its header has {header_bytes / 2**20:,.0f} MiB, more than the tensors of a model need")
    try:
        with safe_open(path, framework=framework) as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it holds values of an unexpected type ({error})") from error
    if CHECKSUM in header and header[CHECKSUM] != content_sha256(header, tensors_sha256(tensors)):
        raise ValueError("its content does not match its checksum")
    return header, tensors


def file_sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def content_sha256(header: Mapping[str, str], sha256: str) -> str:
    """Return a checksum of the tensors' hash and the other header entries."""
    digest = hashlib.sha256(sha256.encode())
    for name in sorted(header.keys() - {CHECKSUM}):
        digest.update(f"\n{len(name)} {name} {header[name]}".encode())
    return digest.hexdigest()


def json_sha256(content: object) -> str:
    """Return the hash of content as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def state_sha256(model: nn.Module) -> str:
    """Return the hash of a model's whole state, in the order of names."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor] | Mapping[str, np.ndarray]) -> str:
    """Return the hash of the names, dtypes, shapes and bytes of tensors or arrays, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.update(f"{name} torch.{dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor | np.ndarray) -> memoryview:
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
