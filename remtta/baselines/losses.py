"""Measures of predictions that published methods share: tensors in, tensors out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.losses import entropy


def come_entropy(logits: Tensor) -> Tensor:
    """Return the entropy (...) of the subjective opinion for which logits (..., C) are evidence, in nats.

    Class beliefs are exp(z) / (sum exp(z) + C), and the uncertainty is C / (sum exp(z) + C). The logits' norm has no
    gradient.

    Source: COME (Zhang et al., ICLR 2025), arXiv:2410.10894.
    """
    fixed_norm = F.normalize(logits, dim=-1) * logits.detach().norm(dim=-1, keepdim=True)
    unknown = torch.full_like(logits[..., :1], math.log(logits.shape[-1]))  # exp of this is C
    return entropy(torch.cat([fixed_norm, unknown], dim=-1))


def soft_likelihood_ratio(logits: Tensor, clip: float) -> Tensor:
    """Return minus the expected log odds (...) of the prediction of logits (..., C), in nats.

    That is -sum p ln(p / (1 - p)), with each p clipped at `clip`; above it the odds would grow without bound, and p has
    no gradient.

    Source: ROID (Marsden et al., WACV 2024), arXiv:2306.00650.
    """
    log_probs = logits.log_softmax(-1).clamp(max=math.log(clip))
    probs = log_probs.exp()
    return -(probs * (log_probs - torch.log1p(-probs))).sum(-1)


def symmetric_cross_entropy(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean (...) of the two cross-entropies between logits (..., C), in nats; both have gradients."""
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    return -0.5 * (log_second.exp() * log_first + log_first.exp() * log_second).sum(-1)


def running_mean(mean: Tensor | None, probs: Tensor, momentum: float) -> Tensor:
    """Return the running mean (C,) of probabilities updated with a batch (B, C), or the batch's own mean at first."""
    new = probs.mean(0)
    return new if mean is None else momentum * mean + (1 - momentum) * new
