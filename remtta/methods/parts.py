"""Gradients of a batch that goes forward and backward in parts: the same update in less memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from remtta.methods.base import Method


def gradients_in_parts(
    method: Method[Any], size: int, images: Tensor, center: Callable[[Tensor], Tensor], *targets: Tensor
) -> Tensor:
    """Compute a batch's gradients from parts of at most `size` images; return its views (L, B, C)."""
    method.model.batch_norms.warn_of_parts()
    all_views, num_counted = [], 0
    for part, *rows in zip(images.split(size), *(tensor.split(size) for tensor in targets), strict=True):
        views, loss, count = method.checked_loss(part, center, *rows)
        if count and loss.requires_grad:  # the loss is a mean; sums over the parts add up to the batch's
            method.model.backward(loss * count)
        num_counted += count
        all_views.append(views)
    if gradients := method.optimizer.gradients():
        torch._foreach_div_(gradients, float(num_counted))
    return torch.cat(all_views, dim=1)
