"""A method, perhaps under the guard, as one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.guard.accuracy import Estimator
from remtta.guard.guard import ALONE, Guard, Said
from remtta.guard.pace import Pace
from remtta.guard.smoothing import Smoother
from remtta.methods.method import Method
from remtta.runs.states import Stateful, take_back


class Adapter:
    """Predicts, learns and is put back; the guard, if there is one, has its say in each.

    Args:
        method: The method.
        guard: What watches it.
        smoother: What has answers go by the frames before, too.
        estimator: What tells how often they are right.
        pace: What leaves updates out that teach next to nothing.
    """

    def __init__(
        self,
        method: Method,
        guard: Guard | None = None,
        smoother: Smoother | None = None,
        estimator: Estimator | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.method, self.guard, self.smoother, self.estimator = method, guard, smoother, estimator
        self.pace = pace
        self._said = ALONE

    @property
    def learns(self) -> bool:
        """Whether a batch may still change anything."""
        return self.method.adapts and not self.retired

    @property
    def said(self) -> Said:
        """Who made the last prediction."""
        return self._said

    @property
    def watched(self) -> bool:
        """Whether the guard decides anything beside who answers."""
        return self.guard is not None and self.guard.options.action != "off"

    @property
    def retired(self) -> bool:
        """Whether the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.judge.retired

    @property
    def ended(self) -> bool:
        """Whether the guard is to end the run now."""
        return self.guard is not None and self.guard.judge.retired and self.guard.options.action == "stop"

    @property
    def total_alarms(self) -> int:
        """Alarms of the guard so far."""
        return self.guard.judge.total_alarms if self.guard else 0

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do what needs the adapted weights in the model: here, where nobody else uses it, at once."""
        work()

    def worth(self, pixels: Tensor, fit: Tensor) -> bool:
        """Whether an update on the fit ones (B,) of the next frames (B, 3, H, W), preprocessed, is worth its time."""
        if self.pace is None or self.retired or not fit.any():
            return True
        return self.pace.wants(pixels[fit.to(pixels.device)])

    def predict(
        self, pixels: Tensor, fit: Tensor | None = None, labels: Tensor | None = None, *, later: bool = False
    ) -> Tensor:
        """Predict all images, from before the update on those of them that are fit for one.

        What the guard comes to think of the fit ones holds for the others, too.

        Args:
            pixels: Shape (B, 3, H, W), preprocessed.
            fit: Shape (B,), on the CPU: which images are learned from; None for all.
            labels: Shape (B,), for methods that learn from them.
            later: Only predict now; `learn` brings the update.

        Returns:
            Logits of shape (B, C); `said` has what they come from.
        """
        self._said = ALONE
        if fit is None or fit.all():
            logits = self._step(pixels, labels, later=later)
        elif not fit.any():
            logits = (self.guard or self.method).predict(pixels)
        else:
            return self._predict_parts(pixels, fit, labels, later=later)
        if self.guard:
            self._said = self.guard.said
        return logits

    def _predict_parts(self, pixels: Tensor, fit: Tensor, labels: Tensor | None, *, later: bool) -> Tensor:
        others = None if self.retired else self.method.predict(pixels[~fit])  # before the update
        stepped = self._step(pixels[fit], None if labels is None else labels[fit], later=later)
        if self.guard is None:
            assert others is not None
            return _put_together(fit, stepped, others)
        said = self.guard.said
        others = self.guard.blend(pixels[~fit], others, weight=said.weight)
        self._said = Said(
            said.weight,
            *(
                None if one is None or other is None else _put_together(fit, one, other)
                for one, other in ((said.adapted, self.guard.said.adapted), (said.source, self.guard.said.source))
            ),
        )
        return _put_together(fit, stepped, others)

    def _step(self, pixels: Tensor, labels: Tensor | None, *, later: bool) -> Tensor:
        step = self.guard or self.method
        if later:
            return step.answer(pixels)
        return step(pixels) if labels is None else step(pixels, labels)

    def smooth(self, logits: Tensor, *, early: bool = False) -> Tensor:
        """What to answer in place of logits (B, C) of the next frames; see `Smoother`."""
        return self.smoother(logits, early=early) if self.smoother else logits

    def estimate(self, logits: Tensor) -> dict[str, float]:
        """Estimated accuracies of the last frames, with those that `predict` has just answered by logits (B, C)."""
        if self.estimator is None:
            return {}
        self.estimator.see(self._said if self.method.adapts else replace(self._said, weight=0.0), logits)
        return self.estimator.estimates

    @property
    def estimates(self) -> dict[str, float]:
        """The same of now; none without an estimator, and in the first frames."""
        return self.estimator.estimates if self.estimator else {}

    @property
    def _beside(self) -> list[Stateful]:
        """Whatever has a state beside the method."""
        return [each for each in (self.guard, self.smoother, self.estimator, self.pace) if each]

    def learn(self) -> None:
        """Adapt to the images of the last `predict` with `later`."""
        (self.guard or self.method).learn()

    def reset(self) -> None:
        """Back to the source weights, exactly."""
        self.method.reset()
        if self.guard:
            self.guard.reset()

    def events(self) -> list[dict[str, Any]]:
        """What is new, what the guard decided, and the estimator told, since the last call."""
        tellers = (self.pace, self.guard.judge if self.guard else None, self.estimator)
        return [event for teller in tellers if teller for event in teller.events()]

    def state(self) -> dict[str, Tensor]:
        """Everything the next update and the next decision depend on."""
        beside = [each.state() for each in self._beside]
        return {name: tensor for state in (self.method.state(), *beside) for name, tensor in state.items()}

    def take_back(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that a file held.

        Raises:
            UsageError: If it is not one that this would save.
        """
        take_back(path, state, *self._beside, self.method)


def _put_together(fit: Tensor, stepped: Tensor, others: Tensor) -> Tensor:
    """Logits (B, C) of all images, from those of the fit ones and of the others."""
    logits = others.new_empty(len(fit), others.shape[1])
    logits[fit], logits[~fit] = stepped.to(logits), others
    return logits
