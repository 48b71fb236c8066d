"""Detect without labels that adaptation does harm, choose predictions accordingly, and undo it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remtta.guard.judge import NOT_FINITE, Judge
from remtta.guard.observer import Answers, Observer
from remtta.methods.method import Method
from remtta.methods.source import CentredSource, Source
from remtta.options import GuardOptions

_LOOKED = "looked"


def guarded(method: Method, options: GuardOptions | None) -> Guard | None:
    """Return a guard for a method, or None if it would have nothing to do; see `Guard`.

    Harm can only be undone for a method with lasting changes to the weights; predictions can be mixed for any method
    whose predictions differ from the source model's.
    """
    config = method.objective.config
    forgets = config.episodic and config.answer is None  # and predicts before it learns
    same = isinstance(method.objective, CentredSource) and not method.net.batch_norms.mixes  # as the source, centred
    if options is None or type(method.objective) is Source or forgets or same:
        return None
    options = options.filled()
    if not method.persists:
        options = replace(options, action="off")
    if (options.action, options.answer) == ("off", "adapted"):
        return None
    return Guard(method, options)


class Guard(Observer):
    """Monitors what a method does to the weights, and predicts with it, with the source model, or with both.

    A window of the last frames shows how the adapted predictions compare with the source's. Predictions are weighted
    accordingly, or left to the source model while adaptation is in doubt. If the adapted model is far behind, or in
    doubt for long, the source weights are restored, with a fresh optimizer and a lower learning rate. After too many
    such alarms adaptation ends, and the source model predicts. With `adapt_every`, images that are not learned from
    take a single forward pass, with interpolated weights if both models contribute.

    Args:
        method: The method; it must use gradient descent unless the guard's action is "off".

    Attributes:
        watches: Whether it does more than choose predictions.
        shifts: Whether the source model sees shifted images, as both models answer; this harms models with batch norms.
        num_source_predictions: Images predicted by the source model besides the adapted one.
    """

    prefix = "guard."

    def __init__(self, method: Method, options: GuardOptions) -> None:
        self.method = method
        changes = method.norms_only and bool(method.adapted_names) and not method.net.batch_norms.mixes
        self._one_pass = method.objective.config.adapt_every > 1 and changes
        self.options = options.filled()
        self.watches = self.options.action != "off"
        self.shifts = self.options.answer == "both" and not method.net.backbone.batch_norms
        self.judge = Judge(self.options)
        self.num_source_predictions = 0

    def learned(self, answers: Answers) -> None:
        """Compare both models' predictions of the learned images, and undo harm."""
        if self._diverged(answers):
            return
        views = self.method.last_views
        assert views is not None
        source = answers.learned_of(answers.compute_source())
        drift = self.method.net.weights.drift() if self.watches else 0.0
        answers.undone = self.judge.judge(source, views[0], int(answers.learned.sum()), drift)
        self._apply(undo=answers.undone)

    def answer(self, answers: Answers) -> None:
        """Predict with the better model, or with both."""
        weight = 0.0 if answers.undone else self.judge.weight
        if self._one_pass and not answers.learned.any() and 0 < weight < 1:
            answers.weight = weight
            answers.logits = self.method.predict(answers.images, answers.fit, share=weight)
            return
        if not answers.undone and self._diverged(answers):
            answers.learned, weight = torch.zeros_like(answers.learned), 0.0
        answers.mix(weight)
        both = answers.source is not None and answers.adapted is not None
        self.num_source_predictions += len(answers.images) * both

    def events(self) -> list[dict[str, Any]]:
        return self.judge.events()

    def reset(self) -> None:
        """Record that the source weights were restored."""
        self.judge.reset()

    def restart(self) -> None:
        """Forget the stream so far, and its alarms."""
        self.judge.restart()
        self._apply(undo=False)

    def max_bytes(self, num_classes: int) -> int:
        """Return the approximate size of its state once the window is full."""
        return self.options.window * 4 * num_classes + 4 * self.options.memory

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next decision depends on, besides the method's state."""
        return {_LOOKED: torch.tensor(self.num_source_predictions), **self.judge.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; call it before the method's own."""
        self.num_source_predictions = int(state[_LOOKED])
        self.judge.load_state(state)
        self._apply(undo=False)

    def _diverged(self, answers: Answers) -> bool:
        """Return whether the learned images gave outputs that are not finite, and if so undo the update."""
        if not self.watches or answers.adapted is None or not answers.learned.any():
            return False
        if torch.isfinite(answers.learned_of(answers.adapted)).all():
            return False
        self._apply(undo=self.judge.alarm(NOT_FINITE))
        answers.undone = True
        return True

    def _apply(self, *, undo: bool) -> None:
        if undo:
            self.method.reset(keeps_source=True)
        self.method.scale_lr(self.judge.lr_scale)
