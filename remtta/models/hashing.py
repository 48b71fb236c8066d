"""Hashes of models' weights, and of JSON; torch is imported only when there are tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

Part = tuple[str, str, tuple[int, ...], memoryview]
"""Name, dtype as torch writes it, shape, and bytes of an array."""


def parts_sha256(parts: Iterable[Part]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of arrays, given in the order of their names."""
    digest = hashlib.sha256()
    for name, dtype, shape, content in parts:
        digest.update(f"{name} {dtype} {shape}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def json_sha256(content: object) -> str:
    """Return the hash of content as JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def state_sha256(model: nn.Module) -> str:
    """Return the hash of a model's whole state, in the order of names."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return the hash of tensors, in the order of names."""
    return parts_sha256(_part(name, tensors[name]) for name in sorted(tensors))


def _part(name: str, tensor: Tensor) -> Part:
    import torch

    content = tensor.detach().cpu().contiguous()
    return name, str(content.dtype), tuple(content.shape), content.reshape(-1).view(torch.uint8).numpy().data
