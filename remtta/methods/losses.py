"""Entropies and other measures of predictions that several methods share: tensors in, tensors out."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of the softmax over the last dimension.

    Args:
        logits: Shape (..., C).

    Returns:
        Shape (...), in nats.
    """
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def come_entropy(logits: Tensor) -> Tensor:
    """Entropy of the opinion that the logits are evidence for, in place of the softmax's.

    The classes share exp(z) / (sum exp(z) + C) of the belief and "do not know"
    holds the rest, C / (sum exp(z) + C). No gradient changes the logits' norm.

    Args:
        logits: Shape (..., C).

    Returns:
        Shape (...), in nats.

    Source: COME (Zhang et al., ICLR 2025), arXiv:2410.10894.
    """
    fixed_norm = F.normalize(logits, dim=-1) * logits.detach().norm(dim=-1, keepdim=True)
    unknown = torch.full_like(logits[..., :1], math.log(logits.shape[-1]))  # exp of it is C
    return entropy(torch.cat([fixed_norm, unknown], dim=-1))


def soft_likelihood_ratio(logits: Tensor, clip: float) -> Tensor:
    """Minus the expected log odds of a prediction under itself.

    -sum p ln(p / (1 - p)), with each p held at `clip` or below: a probability
    above it has no gradient, where the odds would grow without bound.

    Args:
        logits: Shape (..., C).
        clip: Largest probability, in (0, 1).

    Returns:
        Shape (...), in nats.

    Source: ROID (Marsden et al., WACV 2024), arXiv:2306.00650.
    """
    log_probs = logits.log_softmax(-1).clamp(max=math.log(clip))
    probs = log_probs.exp()
    return -(probs * (log_probs - torch.log1p(-probs))).sum(-1)


def symmetric_cross_entropy(first: Tensor, second: Tensor) -> Tensor:
    """Mean of the cross-entropies of two predictions against one another; both have gradients.

    Args:
        first: Logits (..., C).
        second: Logits (..., C).

    Returns:
        Shape (...), in nats.
    """
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)
    return -0.5 * (log_second.exp() * log_first + log_first.exp() * log_second).sum(-1)


def total_variation(logits: Tensor) -> Tensor:
    """Total variation distance of the masked views' predictions from the plain one's: half the L1 distance.

    Args:
        logits: Shape (L, B, C), the plain view first.

    Returns:
        Shape (B,), in [0, 1]: the mean over the L - 1 masked views.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Failure Case Analysis".
    """
    probs = logits.softmax(-1)
    return 0.5 * (probs[1:] - probs[0]).abs().sum(-1).mean(0)


def transductive_loss(images: Tensor, texts: Tensor, scale: Tensor, temperature: float = 0.01) -> Tensor:
    """Cross-entropy of how each image is like the texts against how a batch's images and texts are like one another.

    Args:
        images: Embeddings (B, E) of the images, at length one.
        texts: Those of the text that goes with each.
        scale: Of the logits between the two.
        temperature: Of the targets, which carry a gradient, as in the official codes of CLIPArTT and WATT.

    Returns:
        Scalar, in nats.
    """
    targets = ((images @ images.T + texts @ texts.T) / 2 / temperature).softmax(-1)
    by_image = (scale * images @ texts.T).log_softmax(-1)
    return -(targets.T * by_image).sum(-1).mean()
