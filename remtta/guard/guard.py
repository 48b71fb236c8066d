"""Notice without labels that adaptation does harm, answer accordingly, and undo it.

The sign: how much the predictions on the same frames tell apart, adapted against source. Mutual information
between input and prediction, H(mean p) - mean H(p), falls when one class takes over; but adaptation also makes every
prediction more certain, which raises it. So the adapted logits are first scaled to the source's mean entropy: what is
left is the difference at equal confidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from remtta.guard.evidence import mixture
from remtta.guard.judge import NOT_FINITE, Judge
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig
from remtta.options import GuardOptions

_PREFIX = "guard."
_CREDIT, _LOOKED = "credit", "looked"


def guarded(
    method: Method, options: GuardOptions | None, config: MethodConfig, *, sparing: bool = False
) -> Guard | None:
    """A guard for a method, or None if there is nothing for it to do; see `Guard`.

    Only of a method whose changes to the weights add up can harm be undone; answers can be mixed of any but those
    that are the source's own.
    """
    forgets = config.episodic and config.answer is None  # and predicts before it learns
    if options is None or method.objective.is_source or forgets:
        return None
    if not method.lasts:
        options = replace(options, action="off")
    return None if (options.action, options.answer) == ("off", "adapted") else Guard(method, options, sparing=sparing)


@dataclass(frozen=True)
class Said:
    """An answer, and where it comes from.

    Attributes:
        weight: The adapted model's share in it.
        adapted: Its logits (B, C); None where it was not asked.
        source: The source model's; None likewise.
    """

    weight: float
    adapted: Tensor | None
    source: Tensor | None

    def after(self, count: int) -> Said:
        """The same without the first images."""
        adapted, source = (None if logits is None else logits[count:] for logits in (self.adapted, self.source))
        return Said(self.weight, adapted, source)


ALONE = Said(1.0, None, None)
"""What a method says that nobody guards."""


class Guard:
    """Runs a method, watches what it does to the weights, and answers by it, by the source model, or by both.

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
        self.options = options or GuardOptions()
        self.judge = Judge(self.options)
        self.num_looked = 0  # forward passes of one image that it took beside the method's
        self.said = ALONE
        self._credit = 0.0  # such passes that it may still take
        self._answered: tuple[Tensor, Tensor | None] | None = None  # images that `learn` is to adapt to, the source's

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, C) to answer with for preprocessed images (B, 3, H, W); the method then adapts to them.

        `said` tells afterwards what they come from.
        """
        if self.judge.retired:
            return self.blend(images, None)
        logits = self.method(images, labels) if labels is not None else self.method(images)
        if self._watches and not torch.isfinite(logits).all():
            self._roll_back()
            return self.blend(images, None, weight=0)
        source = self._look(images)
        by_source = self._judge(len(images))
        return self.blend(images, logits, source, weight=0 if by_source else None)

    def answer(self, images: Tensor) -> Tensor:
        """Logits (B, C) to answer with at once, by what was known before this batch; `learn` then adapts to it."""
        if self.judge.retired:
            return self.blend(images, None)
        logits = self.method.answer(images)
        if self._watches and not torch.isfinite(logits).all():
            self._roll_back()
            return self.blend(images, None, weight=0)
        answer = self.blend(images, logits)
        self._answered = images, self.said.source
        return answer

    def learn(self) -> None:
        """Have the method adapt to the images of the last `answer`, and judge."""
        if self._answered is None:
            return
        (images, source), self._answered = self._answered, None
        self.method.learn()
        self._look(images, source)
        self._judge(len(images))

    def predict(self, images: Tensor) -> Tensor:
        """Logits (B, C) to answer with, without adapting."""
        weight = self.judge.weight
        if self._between and 0 < weight < 1:
            self.said = Said(weight, None, None)
            return self._between.predict_between(images, weight)
        return self.blend(images, None if weight == 0 else self.method.predict(images))

    @torch.no_grad()
    def blend(
        self, images: Tensor, adapted: Tensor | None, source: Tensor | None = None, *, weight: float | None = None
    ) -> Tensor:
        """An answer (B, C) of the adapted and the source model.

        Args:
            images: Shape (B, 3, H, W), preprocessed, for the source model to see if it is to have a say.
            adapted: The adapted model's logits (B, C); None where the weight is 0.
            source: The source model's, if they are known.
            weight: The adapted model's share; that of the moment if None.
        """
        weight = self.judge.weight if weight is None else weight
        if source is None and weight < 1:
            source = self._see(images)
        self.said = Said(weight, adapted, source)
        if adapted is None or weight == 0:
            assert source is not None
            return source
        return adapted if source is None or weight == 1 else mixture(adapted, source, weight)

    def reset(self) -> None:
        """Note that the method is back at the source weights."""
        self.judge.reset()

    def most_bytes(self, num_classes: int) -> int:
        """What its state takes once the window is full, headers aside."""
        return self.options.window * 4 * num_classes + 4 * self.options.memory

    def state(self) -> dict[str, Tensor]:
        """Everything its next decision depends on, beside the method's state."""
        spent = {_CREDIT: torch.tensor(self._credit, dtype=torch.float64), _LOOKED: torch.tensor(self.num_looked)}
        return {_PREFIX + name: tensor for name, tensor in {**spent, **self.judge.state()}.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; to be called before the method's own."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        self._credit, self.num_looked = float(own[_CREDIT]), int(own[_LOOKED])
        self.judge.load_state(own)
        self._set_learning_rate()

    def _look(self, images: Tensor, source: Tensor | None = None) -> Tensor | None:
        """Have frames judged by what both models say of them; returns the source's logits (B, C), if it saw all."""
        views, options = self.method.last_views, self.options
        assert views is not None
        chosen = torch.arange(len(images))
        if source is None and options.answer == "adapted":
            self._credit += options.cost * sum(self.method.objective.passes()) * len(images)
            count = min(len(images), int(self._credit))
            self._credit = min(self._credit - count, options.window)
            chosen = torch.linspace(0, len(images) - 1, count).round().long()
        if not len(chosen):
            return None
        if source is None:
            source = self._see(images[chosen])
        self.judge.see(source, views[0][chosen.to(views.device)])
        return source if len(source) == len(images) else None

    def _judge(self, num_frames: int) -> bool:
        """Whether harm was undone, so that the source is to answer."""
        acted = self.judge.judge(num_frames, self.method.drift() if self._watches else 0.0)
        if acted:
            self.method.reset()
        self._set_learning_rate()
        return acted

    def _roll_back(self) -> None:
        """Undo what gave outputs that are not finite numbers, unless it is only to tell of it."""
        if self.judge.alarm(NOT_FINITE):
            self.method.reset()
        self._set_learning_rate()

    def _set_learning_rate(self) -> None:
        self.method.scale_lr(self.judge.lr_scale)

    def _see(self, images: Tensor) -> Tensor:
        self.num_looked += len(images)
        size = self.method.objective.part_size(len(images))
        return torch.cat([self.method.predict_source(part) for part in images.split(size)])

    @property
    def _watches(self) -> bool:
        return self.options.action != "off"
