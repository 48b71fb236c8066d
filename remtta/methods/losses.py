"""Entropies of predictions, and the losses of REM: tensors in, tensors out."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor
from torch.nn import functional as F


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy (...) of the softmax of logits (..., C), in nats."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def log_mean_probs(logits: Tensor) -> Tensor:
    """Return the log of the mean prediction (C,) of views (V, C)."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction of views (V, C): a scalar, in nats."""
    log_mean = log_mean_probs(logits)
    return -(log_mean.exp() * log_mean).sum()


def rem_loss(
    logits: Tensor,
    ranking_weight: float,
    margin: float = 0.0,
    measure: Callable[[Tensor], Tensor] = entropy,
    consistency_weight: float = 1.0,
) -> Tensor:
    """Return the complete loss of REM, in nats: consistency plus weighted ranking; raise ValueError if logits is not
    3-D or has fewer than two views.

    Args:
        logits: Shape (L, B, C), views by ascending mask ratio.
        ranking_weight: The paper's lambda.
        margin: Required entropy gap, in nats.
        measure: Entropy of logits (..., C) by which the views are ranked.
        consistency_weight: Weight of the consistency loss, 1 in the paper.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 5.
    """
    consistency = consistency_weight * masked_consistency_loss(logits)
    return consistency + ranking_weight * entropy_ranking_loss(logits, margin, measure)


def masked_consistency_loss(logits: Tensor) -> Tensor:
    """Pull the predictions of more masked views towards those of less masked ones.

    Sums the cross-entropy of view j against the fixed target softmax(view i) over pairs i < j, averaged over the batch.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 3.
    """
    log_probs = logits.log_softmax(-1)
    targets = log_probs.detach().exp()
    return torch.stack([-(targets[i] * log_probs[j]).sum(-1).mean() for i, j in _pairs(logits)]).sum()


def entropy_ranking_loss(logits: Tensor, margin: float = 0.0, measure: Callable[[Tensor], Tensor] = entropy) -> Tensor:
    """Penalise a less masked view whose entropy exceeds that of a more masked one.

    Sums relu(H_i - stop_gradient(H_j) + margin) over pairs i < j, averaged over the batch.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 4.
    """
    entropies = measure(logits)
    fixed = entropies.detach()
    return torch.stack([F.relu(entropies[i] - fixed[j] + margin).mean() for i, j in _pairs(logits)]).sum()


def _pairs(logits: Tensor) -> combinations[tuple[int, int]]:
    """Return all pairs i < j of views (L, B, C)."""
    if logits.ndim != 3 or len(logits) < 2:
        raise ValueError(f"logits must have shape (L, B, C) with at least 2 views, got {tuple(logits.shape)}")
    return combinations(range(len(logits)), 2)
