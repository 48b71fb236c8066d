"""Entropies and other measures of predictions shared by several methods: tensors in, tensors out."""

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


def total_variation(logits: Tensor) -> Tensor:
    """Return the mean total variation distance (B,) between masked views' predictions and the plain one's, in [0, 1].

    Logits are (L, B, C), the plain view first; the distance is half the L1 distance.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Failure Case Analysis".
    """
    probs = logits.softmax(-1)
    return 0.5 * (probs[1:] - probs[0]).abs().sum(-1).mean(0)


def transductive_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Return the cross-entropy of image-text similarities against similarities among images and among texts, in nats.

    Both arguments are embeddings (B, E) of length one, with a text for each image. The targets have a temperature of
    0.01 and carry a gradient, as in the official code of CLIPArTT and WATT.
    """
    targets = ((images @ images.T + texts @ texts.T) / 2 / 0.01).softmax(-1)
    by_image = (scale * images @ texts.T).log_softmax(-1)
    return -(targets.T * by_image).sum(-1).mean()


def log_mean_probs(logits: Tensor) -> Tensor:
    """Return the log of the mean prediction (C,) of views (V, C)."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the mean prediction of views (V, C): a scalar, in nats."""
    log_mean = log_mean_probs(logits)
    return -(log_mean.exp() * log_mean).sum()


def running_mean(mean: Tensor | None, probs: Tensor, momentum: float) -> Tensor:
    """Return the running mean (C,) of probabilities updated with a batch (B, C), or the batch's own mean at first."""
    new = probs.mean(0)
    return new if mean is None else momentum * mean + (1 - momentum) * new


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
