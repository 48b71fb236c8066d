"""Notice without labels that adaptation does harm, answer accordingly, and undo it.

The sign: how much the predictions on the same frames tell apart, adapted against source. Mutual information
between input and prediction, H(mean p) - mean H(p), falls when one class takes over; but adaptation also makes every
prediction more certain, which raises it. So the adapted logits are first scaled to the source's mean entropy: what is
left is the difference at equal confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from remtta.guard.judge import NOT_FINITE, Judge
from remtta.guard.observer import Answers, Observer
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig
from remtta.options import GuardOptions

_PREFIX, _LOOKED = "guard.", "looked"


def guarded(method: Method, options: GuardOptions | None, config: MethodConfig) -> Guard | None:
    """A guard for a method, or None if there is nothing for it to do; see `Guard`.

    Only of a method whose changes to the weights add up can harm be undone; answers can be mixed of any but those
    that are the source's own.
    """
    forgets = config.episodic and config.answer is None  # and predicts before it learns
    if options is None or method.objective.is_source or forgets:
        return None
    options = options.filled()
    if not method.lasts:
        options = replace(options, action="off")
    if (options.action, options.answer) == ("off", "adapted"):
        return None
    return Guard(method, options, sparing=config.adapt_every > 1)


class Guard(Observer):
    """Watches what a method does to the weights, and answers by it, by the source model, or by both.

    A window of the last frames says how far the adapted predictions are ahead of the source's. By that an
    answer is weighed, or given to the source while adaptation is in doubt. Where it is far behind, or in doubt for
    long, the source weights come back, with a fresh optimizer and a lower learning rate. After too many such alarms
    adaptation ends, and the source answers.

    Args:
        method: The method; one of gradient descent unless the guard's action is "off".
        options: When to act, and how.
        sparing: Whether images that are not learned from are answered in one forward pass, by weights in between
            where both models are to answer.
    """

    def __init__(self, method: Method, options: GuardOptions | None = None, *, sparing: bool = False) -> None:
        self.method = method
        self._between = method if sparing and method.blends else None
        self.options = (options or GuardOptions()).filled()
        self.judge = Judge(self.options)
        self.num_looked = 0  # images that the source model was asked about

    @property
    def watches(self) -> bool:
        """Whether it decides anything beside who answers."""
        return self.options.action != "off"

    def learned(self, answers: Answers) -> None:
        """Look at what both models said of the learned images, and undo harm."""
        if self._diverged(answers):
            return
        self._look(answers)
        drift = self.method.drift() if self.watches else 0.0
        answers.undone = self.judge.judge(int(answers.learned.sum()), drift)
        self._apply(undo=answers.undone)

    def answer(self, answers: Answers) -> None:
        """Answer by whichever model sees more, or by both."""
        weight = 0.0 if answers.undone else self.judge.weight
        if self._between and not answers.learned.any() and 0 < weight < 1:
            answers.weight = weight
            answers.logits = self._between.predict(answers.images, answers.fit, share=weight)
            return
        if not answers.undone and self._diverged(answers):
            answers.learned, weight = torch.zeros_like(answers.learned), 0.0
        answers.answer_by(weight)
        self.num_looked += len(answers.images) * (answers.source is not None)

    def events(self) -> list[dict[str, Any]]:
        """Return what it decided since the last call."""
        return self.judge.events()

    def reset(self) -> None:
        """Take note that the source weights are back."""
        self.judge.reset()

    def most_bytes(self, num_classes: int) -> int:
        """Return what its state takes once the window is full, headers aside."""
        return self.options.window * 4 * num_classes + 4 * self.options.memory

    def state(self) -> dict[str, Tensor]:
        """Return everything its next decision depends on, beside the method's state."""
        own = {_LOOKED: torch.tensor(self.num_looked), **self.judge.state()}
        return {_PREFIX + name: tensor for name, tensor in own.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; to be called before the method's own."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self.num_looked = int(own[_LOOKED])
        self.judge.load_state(own)
        self._apply(undo=False)

    def _diverged(self, answers: Answers) -> bool:
        """Whether the learned images gave outputs that are not finite numbers, which is undone."""
        if not self.watches or answers.adapted is None or not answers.learned.any():
            return False
        if torch.isfinite(answers.adapted[answers.learned]).all():
            return False
        self._apply(undo=self.judge.alarm(NOT_FINITE))
        answers.undone = True
        return True

    def _look(self, answers: Answers) -> None:
        """Have the learned images judged by what both models say of them."""
        views = self.method.last_views
        assert views is not None
        self.judge.see(answers.ask_source()[answers.learned.to(views.device)], views[0])

    def _apply(self, *, undo: bool) -> None:
        """Bring the source weights back if harm is to be undone, and set the learning rate of the moment."""
        if undo:
            self.method.reset(keeps_source=True)
        self.method.scale_lr(self.judge.lr_scale)
