"""A method with its observers, as one thing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from remtta.guard.guard import Guard
from remtta.guard.observer import Answers, Observer
from remtta.methods.method import Method

T = TypeVar("T", bound=Observer)


class ObservedMethod:
    """Predicts and learns; observers take note of it, and change answers.

    Attributes:
        frozen: Whether it only predicts from now on: no weight changes any more, nor what logits are centred by.

    Args:
        method: The method.
        observers: Who watches it: the pace, the guard, the estimator, the smoother, in this order.
    """

    def __init__(self, method: Method, observers: Sequence[Observer] = ()) -> None:
        self.method, self.observers, self.frozen = method, observers, False
        self._waiting: Answers | None = None  # whose images `learn` is to adapt to

    def find(self, kind: type[T]) -> T | None:
        """Return the observer of a kind, if there is one."""
        return next((each for each in self.observers if isinstance(each, kind)), None)

    @property
    def guard(self) -> Guard | None:
        """The guard, if there is one."""
        return self.find(Guard)

    @property
    def retired(self) -> bool:
        """Whether the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.judge.retired

    @property
    def total_alarms(self) -> int:
        """Alarms of the guard so far."""
        return self.guard.judge.total_alarms if self.guard else 0

    @property
    def learns(self) -> bool:
        """Whether a batch may still change anything."""
        return self.method.adapts and not self.retired and not self.frozen

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do what needs the adapted weights in the model: here, where nobody else uses it, at once."""
        work()

    def left_out(self, images: Tensor, fit: Tensor) -> str | None:
        """Return why the next batch is not to be learned from; None if its fit images are.

        Args:
            images: Shape (B, 3, H, W), preprocessed.
            fit: Shape (B,), on the CPU: which of them may be learned from.
        """
        if self.retired or not fit.any():
            return None
        chosen = images[fit.to(images.device)]
        return next((reason for each in self.observers if (reason := each.before(chosen))), None)

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
        """Answer all images, from before the update on those of them that are fit for one.

        What observers come to think of the fit ones holds for the others, too.

        Args:
            images: Shape (B, 3, H, W), preprocessed.
            fit: Shape (B,), on the CPU: which images may be learned from; None for all.
            labels: Shape (B,), for methods that learn from them.
            left_out: None of them is learned from all the same: `left_out` said why.
            later: Only predict now; `learn` brings the update.
            early: The images come again, with the rest of their batch.
        """
        fit = torch.ones(len(images), dtype=torch.bool) if fit is None else fit
        learned = torch.zeros_like(fit) if left_out or self.retired else fit
        answers = Answers(self.method, images, learned, fit=fit, early=early)
        if learned.any():
            if self.guard is not None:  # the source's answers come first: the adapted model's are centred by them
                answers.ask_source()
            answers.adapted = self._step(images, learned, labels, later=later)
            if not later:
                self._note_update(answers)
        if self.guard is None:
            answers.answer_by(1.0)
        for observer in self.observers:
            observer.answer(answers)
        self._waiting = answers if later else None
        return answers

    def learn(self) -> None:
        """Adapt to the images of the last `predict` with `later`."""
        answers, self._waiting = self._waiting, None
        if answers is not None and answers.learned.any():
            self.method.learn()
            self._note_update(answers)

    def _step(self, images: Tensor, learned: Tensor, labels: Tensor | None, *, later: bool) -> Tensor:
        """Logits (B, C) from before the update, which the learned images enter."""
        if learned.all():
            return self.method.answer(images) if later else self.method(images, labels)
        labels = None if labels is None else labels[learned]
        before = self.method.net.offset
        others = self.method.predict(images[~learned]) + before
        own = self.method.answer(images[learned]) if later else self.method(images[learned], labels)
        others -= self.method.net.offset  # which these images are not fit to tell
        logits = others.new_empty(len(images), others.shape[1])
        logits[learned], logits[~learned] = own.to(logits), others
        return logits

    def _note_update(self, answers: Answers) -> None:
        for observer in self.observers:
            observer.learned(answers)

    def reset(self) -> None:
        """Go back to the source weights, exactly."""
        self.method.reset()
        for observer in self.observers:
            observer.reset()

    def events(self) -> list[dict[str, Any]]:
        """Return what the observers have to tell since the last call."""
        return [event for observer in self.observers for event in observer.events()]

    def state(self) -> dict[str, Tensor]:
        """Return everything the next update and the next decision depend on."""
        states = [self.method.state(), *(observer.state() for observer in self.observers)]
        return {name: tensor for state in states for name, tensor in state.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        for observer in self.observers:
            observer.load_state(state)
        self.method.load_state(state)  # last: the guard has set its learning rate
