"""Smooth predictions over time, since labels persist on video, while frames come in order.

This is a Bayesian filter over the classes, in which a frame's class equals the previous one with some probability, and
is otherwise arbitrary. Whether frames come in order at all is judged by a likelihood ratio: does such a filter predict
the next prediction better than the recent class frequencies? For unordered frames it cannot, whatever class the model
prefers: the ratio's mean is 1, so that its product seldom grows large.

How long classes persist is estimated from how often a prediction equals that of two frames before, relative to how
often it equals that of the frame before: if a class persists with probability p, that ratio is p, however often the
model errs. It is squared, because alternating classes that look alike can be mistaken for one that persists.

Neighbouring frames of a video are nearly equal, so their errors are, too: 25 of them are not 25 pieces of evidence. If
frames were independent, two of one class would differ in prediction about as often as the model doubts itself (with
probability 1 - sum p^2). The rarer the differences, the less a frame counts, unless its prediction has changed.

The idea of a filter gated by likelihood ratios is from Order-Aware Test-Time Adaptation, arXiv:2601.21012, which learns
a transition matrix; here a single number says how long classes persist.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from remtta.pipeline.prediction import Prediction, PredictionTransform

_STAYS = 0.7  # assumed probability that the next frame shows the same class, for the test of order
_MAX_STAYS = 0.98  # upper bound of that probability in predictions
_COMPARED = 0.01  # weight of the newest frame in the rate of repeats: about the last 100 frames
_RENEWED = 0.02  # weight of the newest frame in the class frequencies: about the last 50 frames
_PRIOR_FRAMES = 5  # number of frames by which the uniform prior counts at the start
_ENOUGH = 20.0  # nats of evidence for order: exceeded by chance once in e^20 streams
_MAX, _LEAST = 40.0, -10.0  # bounds in nats, so that a change is noticed soon
_FLOOR = 1e-9  # minimum probability


@dataclass(frozen=True)
class FilterState:
    """The state of the filter after the frames so far."""

    usual: np.ndarray  # recent mean prediction, shape (C,)
    expected: np.ndarray  # current class distribution relative to `usual`, for the test of order, shape (C,)
    belief: np.ndarray  # current class distribution for predictions, shape (C,)
    previous: np.ndarray  # the last frame's probabilities, shape (C,)
    evidence: float = 0.0  # evidence for order, in nats
    frames: int = 0  # number of frames
    repeat_rate_lag1: float = 0.0  # recent share of predictions equal to that of the frame before
    repeat_rate_lag2: float = 0.0  # of those equal to that of two frames before
    doubt: float = 0.0  # recent mean of 1 - sum p^2
    before: int = -1  # prediction for the frame before the last one; -1: none

    @classmethod
    def initial(cls, num_classes: int) -> FilterState:
        """Return the state for C classes before the first frame."""
        any_class = np.full(num_classes, 1 / num_classes)
        return cls(any_class, any_class, any_class, any_class)

    @property
    def ordered(self) -> bool:
        return self.evidence > _ENOUGH

    @property
    def last(self) -> int:
        """Prediction for the last frame; -1 before the first."""
        return int(self.previous.argmax()) if self.frames else -1

    def after(self, logits: Tensor) -> Iterator[FilterState]:
        """Yield the state after each of the next frames, with logits (B, C) on the CPU; NaNs do not count."""
        state_now = self
        for probs in logits.double().softmax(-1).clamp(min=_FLOOR).numpy():
            state_now = state_now._step(probs) if np.isfinite(probs).all() else state_now
            yield state_now

    def state_dict(self) -> dict[str, Tensor]:
        vectors = torch.from_numpy(np.stack([self.usual, self.expected, self.belief, self.previous]))
        numbers = [
            self.evidence,
            self.frames,
            self.repeat_rate_lag1,
            self.repeat_rate_lag2,
            self.doubt,
            self.last,
            self.before,
        ]
        return {"classes": vectors, "numbers": torch.tensor(numbers, dtype=torch.float64)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> FilterState:
        usual, expected, belief, previous = state["classes"].double().numpy()
        evidence, frames, lag1, lag2, doubt, _, before = state["numbers"].tolist()
        return cls(usual, expected, belief, previous, evidence, int(frames), lag1, lag2, doubt, int(before))

    def _step(self, probs: np.ndarray) -> FilterState:
        """Return the state after one more frame with predicted probabilities (C,), all above 0."""
        predicted = (_STAYS * self.expected / self.usual + 1 - _STAYS) * probs
        ratio = predicted.sum()
        # The square root is a compromise: it corrects a model that overpredicts a class, but believes a camera that
        # sees it often.
        prior = np.sqrt(self.usual) / np.sqrt(self.usual).sum()
        change = np.abs(probs - self.previous).sum() / 2
        # 1 for different images, near 0 for nearly equal ones.
        lag1, lag2 = self.repeat_rate_lag1, self.repeat_rate_lag2
        independence = min((1 - lag1) / self.doubt, 1.0) ** 2 if self.doubt > 0 else 1.0
        persistence = min(lag2 / lag1, _MAX_STAYS) ** 2 if lag1 > 0 else 0.0
        stays = persistence * (1 - (1 - independence) * change)
        belief = (stays * self.belief + (1 - stays) * prior) * (probs / prior) ** max(independence, change)
        newest = max(_RENEWED, 1 / (self.frames + 1 + _PRIOR_FRAMES))
        prediction, compared = probs.argmax(), max(_COMPARED, 1 / (self.frames + 1))
        return FilterState(
            usual=(1 - newest) * self.usual + newest * probs,
            expected=predicted / ratio,
            belief=belief / belief.sum(),
            previous=probs,
            evidence=min(max(self.evidence + math.log(ratio), _LEAST), _MAX),
            frames=self.frames + 1,
            repeat_rate_lag1=(1 - compared) * self.repeat_rate_lag1 + compared * (prediction == self.last),
            repeat_rate_lag2=(1 - compared) * self.repeat_rate_lag2 + compared * (prediction == self.before),
            doubt=(1 - compared) * self.doubt + compared * (1 - float(probs @ probs)),
            before=self.last,
        )


class Smoother(PredictionTransform):
    """Smooths predictions with earlier frames while frames come in order; else leaves them unchanged, bit for bit."""

    prefix = "smooth."

    def __init__(self, num_classes: int) -> None:
        self._filter = self._early_filter = FilterState.initial(num_classes)

    def __call__(self, prediction: Prediction) -> Prediction:
        raw = prediction.logits.cpu()
        state_now = self._early_filter if prediction.early else self._filter
        smoothed = raw.clone()
        for place, now in enumerate(state_now.after(raw)):
            state_now = now
            if now.ordered and torch.isfinite(raw[place]).all():
                smoothed[place] = torch.from_numpy(np.log(now.belief))
        self._early_filter = state_now
        if not prediction.early:
            self._filter = state_now
        return replace(prediction, logits=smoothed, unsmoothed=raw)

    def on_new_stream(self) -> None:
        self._filter = self._early_filter = FilterState.initial(len(self._filter.usual))

    def state_dict(self) -> dict[str, Tensor]:
        return self._filter.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._filter = self._early_filter = FilterState.from_state(state)
