"""Forward passes of the source and the adapted model, and the ensemble of their predictions. All logits are raw."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.pipeline.information import mixture


@torch.no_grad()
def source_logits(method: Method[MethodConfig], images: Tensor) -> Tensor:
    """Return the source model's logits (B, C) of transformed images (B, 3, H, W)."""
    parts = images.split(method.part_size(len(images)))
    return torch.cat([method.model.source_logits(part) for part in parts])


def adapted_logits(
    method: Method[MethodConfig], images: Tensor, learnable: Tensor, learned: Tensor, *, latency: bool
) -> Tensor:
    """Return the adapted model's logits (B, C) of transformed images, those of learned ones for the next `step`.

    Args:
        learnable: Which images represent the stream, shape (B,).
        learned: Which images `step` updates by, shape (B,).
        latency: Return as early as possible, even if `step` takes longer then.
    """
    if not learned.any():
        return method.predict(images, counted=bool(learnable.all()))
    if learned.all():
        return method.predict(images, learn=True, latency=latency)
    others = method.predict(images[~learned], counted=False)
    logits = others.new_empty(len(images), others.shape[1])
    logits[~learned] = others
    logits[learned] = method.predict(images[learned], learn=True, latency=latency)
    return logits


@torch.no_grad()
def shuffled_logits(
    method: Method[MethodConfig], images: Tensor, indices: Tensor, *, of_source: bool = False
) -> Tensor:
    """Return the logits (K, C) of images at indices (K,) with their patches shuffled, by present or source weights."""
    predict = method.model.source_logits if of_source else method.model.logits
    views = method.model.shuffle_patches(images, indices)
    return torch.cat([predict(part) for part in views.split(method.model.part_size(len(views)))])


def shifted(images: Tensor) -> Tensor:
    """Shift images (B, 3, H, W) down and right by 1/28 of their sides: half a patch of 16 in 224 pixels.

    Edges are mirrored. A model's errors on an image and on its copy differ, so their mean is more accurate.
    """
    height, width = images.shape[-2:]
    down, right = max(1, height // 28), max(1, width // 28)
    return F.pad(images, (right, 0, down, 0), mode="reflect")[..., :height, :width]


@torch.no_grad()
def ensemble(source: Tensor | None, adapted: Tensor | None, weight: float) -> Tensor:
    """Return the logits (B, C) of both models' predictions together; `weight` is the adapted model's, 0 to 1."""
    if weight == 0:
        assert source is not None
        return source
    assert adapted is not None
    return adapted if weight == 1 or source is None else mixture(adapted, source, weight)
