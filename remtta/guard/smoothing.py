"""Labels persist on video: each answer takes in what was seen just before, where frames come in order.

A Bayesian filter over the classes, in which the class of a frame is that of the one before with a probability, and else
any. Whether frames come in order at all is judged by the same kind of filter under a likelihood ratio: do the last
predictions foretell the next better than what is usual of late does? If frames are in any order, they cannot, whatever
class the model prefers: the ratio's mean is 1, so that its product seldom gets far.

The idea of a filter behind a gate of likelihood ratios is that of Order-Aware Test-Time Adaptation, arXiv:2601.21012,
which learns a matrix of transitions; here one number says how long classes stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STAYS = 0.7  # probability that the next frame shows the same class by itself, not by chance
_RENEWED = 0.02  # share of the newest frame in what is usual of late, which is the last 50 frames or so
_UNKNOWN = 5  # frames that the assumption that all classes are as usual counts for at the start
_ENOUGH = 20.0  # nats of evidence for an order: by chance once in e^20 streams
_MOST, _LEAST = 40.0, -10.0  # nats that it is kept within, so that a change is noticed soon
_FLOOR = 1e-9  # of a probability
_PREFIX = "smooth."


@dataclass(frozen=True)
class Past:
    """What is known from the frames so far.

    Attributes:
        usual: Mean prediction of late, shape (C,).
        expected: The class of the moment, relative to that: shape (C,).
        belief: The class of the moment, as it answers: shape (C,).
        evidence: For an order, in nats.
        frames: How many there were.
    """

    usual: np.ndarray
    expected: np.ndarray
    belief: np.ndarray
    evidence: float = 0.0
    frames: int = 0

    @classmethod
    def nothing(cls, num_classes: int) -> Past:
        """What is known of C classes before the first frame."""
        any_class = np.full(num_classes, 1 / num_classes)
        return cls(any_class, any_class, any_class)

    @property
    def ordered(self) -> bool:
        """Whether frames come in order."""
        return self.evidence > _ENOUGH

    def through(self, logits: Tensor) -> Iterator[Past]:
        """The same after each of more frames, with these logits (B, C) on the CPU."""
        past = self
        for probs in logits.double().softmax(-1).clamp(min=_FLOOR).numpy():
            past = past._then(probs)
            yield past

    def state(self) -> dict[str, Tensor]:
        """All of it."""
        vectors = torch.from_numpy(np.stack([self.usual, self.expected, self.belief]))
        return {"classes": vectors, "numbers": torch.tensor([self.evidence, self.frames], dtype=torch.float64)}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Past:
        """What `state` returned."""
        usual, expected, belief = state["classes"].double().numpy()
        evidence, frames = state["numbers"].tolist()
        return cls(usual, expected, belief, evidence, int(frames))

    def _then(self, probs: np.ndarray) -> Past:
        """The same with one more frame, whose predicted probabilities (C,) are all above 0."""
        foretold = (_STAYS * self.expected / self.usual + 1 - _STAYS) * probs
        ratio = foretold.sum()
        # By the root: a model that says one class too often is corrected, a camera that sees it often is believed.
        share = np.sqrt(self.usual)
        belief = (_STAYS * share.sum() * self.belief / share + 1 - _STAYS) * probs
        newest = max(_RENEWED, 1 / (self.frames + 1 + _UNKNOWN))
        return Past(
            usual=(1 - newest) * self.usual + newest * probs,
            expected=foretold / ratio,
            belief=belief / belief.sum(),
            evidence=min(max(self.evidence + math.log(ratio), _LEAST), _MOST),
            frames=self.frames + 1,
        )


class Smoother:
    """Answers by the frames before, too, while they come in order; else what it is given, bit for bit.

    Args:
        num_classes: C.
    """

    def __init__(self, num_classes: int) -> None:
        self._past = self._ahead = Past.nothing(num_classes)

    def __call__(self, logits: Tensor, *, early: bool = False) -> Tensor:
        """Logits (B, C) to answer with, for those of the next frames, on the CPU.

        Args:
            logits: What the frames were taken for, each by itself.
            early: Whether they come again, with the rest of their batch.
        """
        past = self._ahead if early else self._past
        answers = logits.clone()
        for place, now in enumerate(past.through(logits)):
            past = now
            if now.ordered:
                answers[place] = torch.from_numpy(np.log(now.belief))
        self._ahead = past
        if not early:
            self._past = past
        return answers

    def state(self) -> dict[str, Tensor]:
        """Everything its next answer depends on."""
        return {_PREFIX + name: tensor for name, tensor in self._past.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self._past = self._ahead = Past.of(own)
