"""Entropies and other measures of predictions that several methods share: tensors in, tensors out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy (...) of the softmax of logits (..., C), in nats."""
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def come_entropy(logits: Tensor) -> Tensor:
    """Entropy (...) of the opinion that logits (..., C) are evidence for, in place of the softmax's, in nats.

    The classes share exp(z) / (sum exp(z) + C) of the belief and "do not know"
    holds the rest, C / (sum exp(z) + C). No gradient changes the logits' norm.

    Source: COME (Zhang et al., ICLR 2025), arXiv:2410.10894.
    """
    fixed_norm = F.normalize(logits, dim=-1) * logits.detach().norm(dim=-1, keepdim=True)
    unknown = torch.full_like(logits[..., :1], math.log(logits.shape[-1]))  # exp of it is C
    return entropy(torch.cat([fixed_norm, unknown], dim=-1))


def soft_likelihood_ratio(logits: Tensor, clip: float) -> Tensor:
    """Minus the expected log odds (...) of the prediction of logits (..., C) under itself, in nats.

    -sum p ln(p / (1 - p)), with each p held at `clip` or below: a probability
    above it has no gradient, where the odds would grow without bound.

    Source: ROID (Marsden et al., WACV 2024), arXiv:2306.00650.
    """
    log_probs = logits.log_softmax(-1).clamp(max=math.log(clip))
    probs = log_probs.exp()
    return -(probs * (log_probs - torch.log1p(-probs))).sum(-1)


def symmetric_cross_entropy(first: Tensor, second: Tensor) -> Tensor:
    """Mean (...) of the cross-entropies of two logits (..., C) against one another, in nats; both have gradients."""
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    return -0.5 * (log_second.exp() * log_first + log_first.exp() * log_second).sum(-1)


def total_variation(logits: Tensor) -> Tensor:
    """Mean total variation distance (B,) of the masked views' predictions from the plain one's, in [0, 1].

    Logits are (L, B, C), the plain view first; the distance is half the L1 distance.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Failure Case Analysis".
    """
    probs = logits.softmax(-1)
    return 0.5 * (probs[1:] - probs[0]).abs().sum(-1).mean(0)


def transductive_loss(images: Tensor, texts: Tensor, scale: Tensor, temperature: float = 0.01) -> Tensor:
    """Cross-entropy of how images are like the texts against how images and texts are like one another, in nats.

    Both are embeddings (B, E) at length one, a text for each image. The targets, softened by the temperature, carry
    a gradient, as in the official codes of CLIPArTT and WATT.
    """
    targets = ((images @ images.T + texts @ texts.T) / 2 / temperature).softmax(-1)
    by_image = (scale * images @ texts.T).log_softmax(-1)
    return -(targets.T * by_image).sum(-1).mean()


def log_mean_probs(logits: Tensor) -> Tensor:
    """Logarithm (C,) of the mean prediction of views (V, C)."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction of views (V, C): a scalar, in nats."""
    log_mean = log_mean_probs(logits)
    return -(log_mean.exp() * log_mean).sum()


def running_mean(mean: Tensor | None, probs: Tensor, momentum: float) -> Tensor:
    """The running mean (C,) of predicted probabilities after one more batch (B, C); the batch's own at first."""
    new = probs.mean(0)
    return new if mean is None else momentum * mean + (1 - momentum) * new


def cosines(mean_probs: Tensor, probs: Tensor) -> Tensor:
    """Cosine (B,) of each image's probabilities (B, C) with the running mean (C,)."""
    return F.cosine_similarity(mean_probs.unsqueeze(0), probs, dim=-1)
