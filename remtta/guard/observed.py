"""A method combined with its observers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.guard import Guard
from remtta.guard.observer import Answers, Observer
from remtta.methods.method import Method
from remtta.models.weights import within

T = TypeVar("T", bound=Observer)

BETWEEN_UPDATES = "between updates"
"""Reason why a frame is not learned from: `adapt_every`."""

_BATCHES = "pace.batches"


class ObservedMethod:
    """Predicts with a method, and learns from every batch or every N-th; observers (guard, estimator and smoother, in
    this order) monitor it and change predictions. Raise UsageError if `adapt_every` is above 1, and updates do not last
    beyond their batch.

    Attributes:
        guard: The guard, if there is one.
        frozen: Whether it only predicts from now on: no weight changes any more, nor what logits are centred by.
    """

    def __init__(self, method: Method, observers: Sequence[Observer] = ()) -> None:
        self._every = method.objective.config.adapt_every
        self._batches = 0  # since the start or a reset
        if self._every > 1 and not method.persists:
            raise UsageError(
                f"with adapt_every={self._every}, updates must last to the next batch, and these do not (a method "
                "without training, or episodic); use adapt_every=1"
            )
        self.method, self.observers, self.frozen = method, observers, False
        self.guard = self.find(Guard)
        self._waiting: Answers | None = None  # predicted with `later`; `learn` adapts to them

    def find(self, kind: type[T]) -> T | None:
        """Return the observer of a class, or None."""
        return next((each for each in self.observers if isinstance(each, kind)), None)

    @property
    def retired(self) -> bool:
        """True if the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.judge.now.retired

    @property
    def total_alarms(self) -> int:
        """Number of alarms of the guard so far."""
        return self.guard.judge.now.total_alarms if self.guard else 0

    @property
    def learns(self) -> bool:
        """True if a batch may still change the weights."""
        return self.method.adapts and not self.retired and not self.frozen

    def in_turn(self, work: Callable[[], None]) -> None:
        """Run `work`, which needs the adapted weights in the model; at once, as this model is not shared."""
        work()

    def left_out(self, fit: Tensor) -> str | None:
        """Return why the next batch, of which `fit` (B,) may be learned from, is excluded from learning, or None."""
        if self._every == 1 or self.retired or not fit.any():
            return None
        self._batches += 1
        return None if self._batches % self._every == 1 else BETWEEN_UPDATES

    def predict(
        self,
        images: Tensor,
        fit: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        left_out: bool = False,
        later: bool = False,
        early: bool = False,
    ) -> Answers:
        """Predict all images with the weights before the update, and update on those that are fit.

        Decisions that observers base on the fit images apply to the others, too.

        Args:
            images: Shape (B, 3, H, W), preprocessed.
            fit: Shape (B,), on the CPU: which images may be learned from; None for all.
            labels: Shape (B,), for methods that learn from them.
            left_out: Learn from none of them, because `left_out` gave a reason.
            later: Only predict now; `learn` makes the update.
            early: The images come again, with the rest of their batch.
        """
        fit = torch.ones(len(images), dtype=torch.bool) if fit is None else fit
        learned = torch.zeros_like(fit) if left_out or self.retired else fit
        shifts = self.guard is not None and self.guard.shifts
        answers = Answers(self.method, images, learned, fit=fit, early=early, shifts=shifts)
        if learned.any():
            if self.guard is not None:  # source predictions first: the adapted model's centring uses them
                answers.compute_source()
            answers.adapted = self._step(images, learned, labels, later=later)
            for observer in () if later else self.observers:
                observer.learned(answers)
        if self.guard is None:
            answers.mix(1.0)
        for observer in self.observers:
            observer.answer(answers)
        self._waiting = answers if later else None
        return answers

    def learn(self) -> None:
        """Adapt to the images of the last `predict` with `later`."""
        answers, self._waiting = self._waiting, None
        if answers is not None and answers.learned.any():
            self.method.learn()
            for observer in self.observers:
                observer.learned(answers)

    def _step(self, images: Tensor, learned: Tensor, labels: Tensor | None, *, later: bool) -> Tensor:
        """Return the logits (B, C) from before the update on the learned images."""
        if learned.all():
            return self.method.answer(images) if later else self.method(images, labels)
        labels = None if labels is None else labels[learned]
        before = self.method.net.centre.offset
        others = self.method.predict(images[~learned]) + before
        own = self.method.answer(images[learned]) if later else self.method(images[learned], labels)
        others -= self.method.net.centre.offset  # these images must not influence the centring
        logits = others.new_empty(len(images), others.shape[1])
        logits[learned], logits[~learned] = own.to(logits), others
        return logits

    def reset(self) -> None:
        """Restore the source weights, exactly."""
        self.method.reset()
        self._batches = 0
        for observer in self.observers:
            observer.reset()

    def restart(self) -> None:
        """Restore the source weights for an independent stream, of which nothing is known yet."""
        self.reset()
        for observer in self.observers:
            observer.restart()

    def events(self) -> list[dict[str, Any]]:
        """Return the observers' events since the last call."""
        return [event for observer in self.observers for event in observer.events()]

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update and decision depend on."""
        states = {each.prefix + name: tensor for each in self.observers for name, tensor in each.state().items()}
        pace = {_BATCHES: torch.tensor(self._batches)} if self._every > 1 else {}
        return {**self.method.state(), **pace, **states}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for each in self.observers:
            each.load_state(within(each.prefix, state))
        if self._every > 1:
            self._batches = int(state[_BATCHES])
        self.method.load_state(state)  # last, since the guard sets its learning rate
