"""The sign of help or harm: how much predictions tell apart, adapted against source."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.guard.window import Window
from remtta.methods.losses import entropy

_BISECTIONS = 14  # the scale to one part in two thousand
_LEAST_INFORMATION = 0.5  # nats; below it a source that knows little would be outdone by chance
_STRETCH = 20  # frames; the median over such stretches is what a class takes most of the time
_LEAST_STRETCHES = 5
_PARKED = 0.3  # share of the frames, beyond one in C, that a class takes where a camera sees little else


@dataclass(frozen=True)
class Evidence:
    """What a window of frames says for the adapted weights.

    Attributes:
        lead: What the adapted predictions have over the source's, as a share; below 0 for harm.
        gap: What they tell apart more than the source's, at equal confidence, in nats.
        information: What the source's tell apart, in nats.
    """

    lead: float
    gap: float
    information: float


def evidence_of(window: Window) -> Evidence:
    """Who sees more in these frames: the adapted or the source model.

    Of frames of many classes, who tells more apart, as a share of what the
    source does. A camera that looks at one class for long has nothing to tell
    apart: who sees more of the class that the source has seen most of.
    """
    gap, information = information_gap(window.adapted, window.source)
    parked = parked_class(window.votes, window.source.shape[1])
    if parked is None:
        return Evidence(gap / max(information, _LEAST_INFORMATION), gap, information)
    seen, seen_by_source = (float(each.float().exp()[:, parked].mean()) for each in (window.adapted, window.source))
    return Evidence(seen - seen_by_source, gap, information)


def parked_class(votes: Tensor, num_classes: int) -> int | None:
    """The class that takes more of the frames than a stream of many classes would give to one; None without one.

    It does so for most of the time: something that comes in between now and
    then, such as the noise of a lost link, is none.

    Args:
        votes: The source's class of each frame, the newest last.
        num_classes: C, for each of which one in C would be a fair share.
    """
    stretches = votes.flip(0).split(_STRETCH)[: len(votes) // _STRETCH]
    if len(stretches) < _LEAST_STRETCHES:
        return None
    counts = torch.stack([torch.bincount(stretch, minlength=num_classes) for stretch in stretches])
    shares = counts.float().median(dim=0).values / _STRETCH
    largest = int(shares.argmax())
    return largest if shares[largest] > 1 / num_classes + _PARKED * (1 - 1 / num_classes) else None


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


def mixture(adapted: Tensor, source: Tensor, weight: float) -> Tensor:
    """Log-probabilities (B, C) of a mixture of two models' predictions.

    Args:
        adapted: Logits (B, C).
        source: Logits (B, C).
        weight: The adapted model's share of each probability, in (0, 1).
    """
    shares = (math.log(weight) + adapted.log_softmax(-1), math.log1p(-weight) + source.log_softmax(-1))
    return torch.logaddexp(*shares)
