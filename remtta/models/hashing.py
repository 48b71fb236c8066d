"""Hashes that tell whether two models have the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def state_sha256(model: nn.Module) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of a model's whole state."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
