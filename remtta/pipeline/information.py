"""The evidence of help or harm: mutual information of the adapted against the source predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.methods.losses import entropy

_BISECTIONS = 14  # precision of the scale: 1 in 2000
_MIN_INFORMATION = 0.5  # nats; below this, chance would outdo an uninformative source model
_STRETCH = 20  # frames; the median over stretches is a class's typical share
_MIN_STRETCHES = 5
_LEAST = torch.finfo(torch.float16).min
_PARKED = 0.3  # share beyond 1 / C of the dominant class of a camera that sees little else


class PredictionWindow:
    """Log-probabilities of the last frames by both models, and the source model's classes of more of them.

    Args:
        size: Number of frames whose log-probabilities are kept, in half precision.
        class_history: Number of frames whose classes are kept.
    """

    def __init__(self, size: int, class_history: int) -> None:
        self._size, self._class_history = size, class_history
        self.source = torch.empty(0, 0, dtype=torch.float16)
        self.adapted = torch.empty(0, 0, dtype=torch.float16)
        self.votes = torch.empty(0, dtype=torch.int32)

    def add(self, source: Tensor, adapted: Tensor) -> None:
        """Add frames by both models' logits (B, C), and drop the oldest."""
        self.votes = torch.cat([self.votes, source.argmax(1).to("cpu", torch.int32)])[-self._class_history :]
        both = [each.float().log_softmax(-1).clamp(min=_LEAST).to("cpu", torch.float16) for each in (source, adapted)]
        self.source, self.adapted = (
            torch.cat([kept if len(kept) else new[:0], new])[-self._size :]
            for kept, new in zip((self.source, self.adapted), both, strict=True)
        )

    def back_to_source(self) -> None:
        self.adapted = self.source.clone()

    def state_dict(self) -> dict[str, Tensor]:
        return {"source": self.source, "adapted": self.adapted, "votes": self.votes}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.source, self.adapted, self.votes = (state[name].clone() for name in ("source", "adapted", "votes"))


@dataclass(frozen=True)
class InformationGap:
    """The comparison of the adapted with the source weights on a window of frames."""

    lead: float  # relative lead of the adapted predictions over the source's; negative for harm
    gap: float  # mutual information of the adapted minus the source predictions, at equal confidence, in nats
    information: float  # mutual information of the source predictions, in nats


def information_gap_of(window: PredictionWindow) -> InformationGap:
    """Compare the adapted and the source model on a window of frames.

    With many classes, the lead is the relative difference in mutual information. If a camera sees one class for a long
    time, there is little information to compare; the lead is then the difference in mean probability of the source's
    dominant class.
    """
    gap, information = information_gap(window.adapted, window.source)
    parked = parked_class(window.votes, window.source.shape[1])
    if parked is None:
        return InformationGap(gap / max(information, _MIN_INFORMATION), gap, information)
    seen, seen_by_source = (float(each.float().exp()[:, parked].mean()) for each in (window.adapted, window.source))
    return InformationGap(seen - seen_by_source, gap, information)


def parked_class(votes: Tensor, num_classes: int) -> int | None:
    """Return the class that dominates the frames far beyond its fair share, or None.

    It must dominate most of the time: an intermittent class, such as the noise of a lost link, does not count.

    Args:
        votes: The source model's class of each frame, the newest last.
        num_classes: C; a fair share is 1 / C.
    """
    stretches = votes.flip(0).split(_STRETCH)[: len(votes) // _STRETCH]
    if len(stretches) < _MIN_STRETCHES:
        return None
    counts = torch.stack([torch.bincount(stretch, minlength=num_classes) for stretch in stretches])
    shares = counts.float().median(dim=0).values / _STRETCH
    largest = int(shares.argmax())
    return largest if shares[largest] > 1 / num_classes + _PARKED * (1 - 1 / num_classes) else None


def mutual_information(logits: Tensor) -> float:
    """Return the mutual information between input and prediction of logits (B, C), H(mean p) - mean H(p), in nats."""
    # Not the entropy of log(mean p), which is NaN if a class has probability 0 everywhere.
    return float(torch.special.entr(logits.softmax(-1).mean(0)).sum() - entropy(logits).mean())


def information_gap(adapted: Tensor, source: Tensor) -> tuple[float, float]:
    """Return the mutual information of adapted minus that of source logits (B, C), in nats, negative for harm, and the
    source's.

    Adaptation makes predictions more confident, which raises it and can hide harm, so they are compared at equal
    confidence.
    """
    adapted, source = adapted.double(), source.double()
    target = entropy(source).mean()
    below_largest = adapted - adapted.amax(-1, keepdim=True)
    scale = largest_scale(lambda scale: bool(_mean_entropy(below_largest * scale) > target), _BISECTIONS)
    information = mutual_information(source)
    return mutual_information(adapted * scale) - information, information


def _mean_entropy(logits: Tensor) -> Tensor:
    """Return the mean entropy of the softmax of logits (B, C) whose largest are 0, in less than half the usual time."""
    exps = logits.exp()
    sums = exps.sum(-1)
    return (sums.log() - exps.mul_(logits).sum(-1) / sums).mean()


def largest_scale(flat: Callable[[float], bool], bisections: int) -> float:
    """Return the largest factor for logits, from 0.02 to 50, at which predictions are still too flat."""
    low, high = 0.02, 50.0
    for _ in range(bisections):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if flat(middle) else (low, middle)
    return low


def mixture(adapted: Tensor, source: Tensor, weight: float) -> Tensor:
    """Return log-probabilities (B, C) of a mixture of two models' logits; `weight`, in (0, 1), is the adapted one's."""
    shares = (math.log(weight) + adapted.log_softmax(-1), math.log1p(-weight) + source.log_softmax(-1))
    return torch.logaddexp(*shares)
