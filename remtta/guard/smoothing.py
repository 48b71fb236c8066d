"""Labels persist on video: each answer takes in what was seen just before, where frames come in order.

A Bayesian filter over the classes, in which the class of a frame is that of the one before with a probability, and else
any. Whether frames come in order at all is judged by the same kind of filter under a likelihood ratio: do the last
predictions foretell the next better than what is usual of late does? If frames are in any order, they cannot, whatever
class the model prefers: the ratio's mean is 1, so that its product seldom gets far.

How long classes stay is told by how often a prediction is that of two frames before, against how often it is that of
the one before: if a class stays with a probability p, p times as often, however often the model errs. This is squared,
as classes that come in turn and look alike are mistaken for one that stays.

The idea of a filter behind a gate of likelihood ratios is that of Order-Aware Test-Time Adaptation, arXiv:2601.21012,
which learns a matrix of transitions; here one number says how long classes stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass

import numpy as np
import torch
from torch import Tensor

from remtta.guard.observer import Answers, Observer

_STAYS = 0.7  # probability that the next frame shows the same class, by which it is judged whether there is an order
_MOST_STAYS = 0.98  # the most that is believed of it in answers
_COMPARED = 0.01  # share of the newest frame in how often predictions come again, which is of the last 100 or so
_RENEWED = 0.02  # share of the newest frame in what is usual of late, which is the last 50 frames or so
_UNKNOWN = 5  # frames that the assumption that all classes are as usual counts for at the start
_ENOUGH = 20.0  # nats of evidence for an order: by chance once in e^20 streams
_MOST, _LEAST = 40.0, -10.0  # nats that it is kept within, so that a change is noticed soon
_FLOOR = 1e-9  # of a probability
_PREFIX = "smooth."


@dataclass(frozen=True)
class _Repeats:
    """How often of late a prediction was that of one and of two frames before, and what these two were (-1: none)."""

    once: float = 0.0
    twice: float = 0.0
    last: int = -1
    before: int = -1

    def then(self, said: int, newest: float) -> _Repeats:
        """The same with one more prediction, which counts for this share."""
        once = (1 - newest) * self.once + newest * (said == self.last)
        twice = (1 - newest) * self.twice + newest * (said == self.before)
        return _Repeats(once, twice, said, self.last)

    @property
    def stays(self) -> float:
        """Probability that the next frame shows the same class."""
        return min(self.twice / self.once, _MOST_STAYS) ** 2 if self.once > 0 else 0.0


@dataclass(frozen=True)
class Past:
    """What is known from the frames so far.

    Attributes:
        usual: Mean prediction of late, shape (C,).
        expected: The class of the moment, relative to that: shape (C,).
        belief: The class of the moment, as it answers: shape (C,).
        evidence: For an order, in nats.
        frames: How many there were.
        repeats: How predictions come again.
    """

    usual: np.ndarray
    expected: np.ndarray
    belief: np.ndarray
    evidence: float = 0.0
    frames: int = 0
    repeats: _Repeats = _Repeats()

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
        numbers = [self.evidence, self.frames, *astuple(self.repeats)]
        return {"classes": vectors, "numbers": torch.tensor(numbers, dtype=torch.float64)}

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Past:
        """What `state` returned."""
        usual, expected, belief = state["classes"].double().numpy()
        evidence, frames, once, twice, last, before = state["numbers"].tolist()
        repeats = _Repeats(once, twice, int(last), int(before))
        return cls(usual, expected, belief, evidence, int(frames), repeats)

    def _then(self, probs: np.ndarray) -> Past:
        """The same with one more frame, whose predicted probabilities (C,) are all above 0."""
        foretold = (_STAYS * self.expected / self.usual + 1 - _STAYS) * probs
        ratio = foretold.sum()
        # By the root: a model that says one class too often is corrected, a camera that sees it often is believed.
        prior, stays = np.sqrt(self.usual), self.repeats.stays
        belief = (stays * prior.sum() * self.belief / prior + 1 - stays) * probs
        newest = max(_RENEWED, 1 / (self.frames + 1 + _UNKNOWN))
        return Past(
            usual=(1 - newest) * self.usual + newest * probs,
            expected=foretold / ratio,
            belief=belief / belief.sum(),
            evidence=min(max(self.evidence + math.log(ratio), _LEAST), _MOST),
            frames=self.frames + 1,
            repeats=self.repeats.then(int(probs.argmax()), max(_COMPARED, 1 / (self.frames + 1))),
        )


class Smoother(Observer):
    """Answers by the frames before, too, while they come in order; else what it is given, bit for bit.

    Args:
        num_classes: C.
    """

    def __init__(self, num_classes: int) -> None:
        self._past = self._ahead = Past.nothing(num_classes)

    def answer(self, answers: Answers) -> None:
        """Answer each of the next frames by those before it, too."""
        answers.raw = raw = answers.logits.cpu()
        past = self._ahead if answers.early else self._past
        answers.logits = raw.clone()
        for place, now in enumerate(past.through(raw)):
            past = now
            if now.ordered:
                answers.logits[place] = torch.from_numpy(np.log(now.belief))
        self._ahead = past
        if not answers.early:
            self._past = past

    def state(self) -> dict[str, Tensor]:
        """Everything its next answer depends on."""
        return {_PREFIX + name: tensor for name, tensor in self._past.state().items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self._past = self._ahead = Past.of(own)
