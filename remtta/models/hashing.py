"""Hashes that tell whether two models have the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.models.digests import Part, parts_sha256


def state_sha256(model: nn.Module) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of a model's whole state."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of tensors."""
    return parts_sha256(_part(name, tensors[name]) for name in sorted(tensors))


def _part(name: str, tensor: Tensor) -> Part:
    content = tensor.detach().cpu().contiguous()
    return name, str(content.dtype), tuple(content.shape), content.reshape(-1).view(torch.uint8).numpy().data
