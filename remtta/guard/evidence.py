"""The sign of help or harm: how much predictions tell apart, adapted against source."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remtta.methods.losses import entropy

_BISECTIONS = 14  # the scale to one part in two thousand


def mutual_information(logits: Tensor) -> float:
    """Between input and prediction: H(mean p) - mean H(p), in nats.

    Args:
        logits: Shape (B, C).
    """
    # Not the entropy of log(mean p): a class whose probability is 0 everywhere would make it NaN.
    return float(torch.special.entr(logits.softmax(-1).mean(0)).sum() - entropy(logits).mean())


def information_gap(adapted: Tensor, source: Tensor) -> tuple[float, float]:
    """How much more the adapted predictions tell apart than the source's, at equal confidence.

    Args:
        adapted: Logits (B, C).
        source: Logits (B, C) for the same images.

    Returns:
        The gap in nats, below 0 for harm; and the source's mutual information.
    """
    adapted, source = adapted.double(), source.double()
    target = entropy(source).mean()
    low, high = 0.02, 50.0
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        if entropy(adapted * middle).mean() > target:
            low = middle
        else:
            high = middle
    information = mutual_information(source)
    return mutual_information(adapted * low) - information, information
