"""Notice without labels that adaptation does harm, and undo it.

The sign: how much the predictions on the same diverse frames tell apart, adapted against source. Mutual information
between input and prediction, H(mean p) - mean H(p), falls when one class takes over; but adaptation also makes every
prediction more certain, which raises it. So the adapted logits are first scaled to the source's mean entropy: what is
left is the difference at equal confidence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from remtta.guard.evidence import information_gap
from remtta.guard.reservoir import Reservoir
from remtta.methods.gradient import GradientMethod
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig
from remtta.options import GuardOptions

_PREFIX = "guard."
_RENEWED_TOGETHER = 8  # a forward pass of a single image wastes most of its time
_LEAST_INFORMATION = 0.5  # nats; below it a source that knows little would raise alarms by chance


def guarded(method: Method, options: GuardOptions | None, config: MethodConfig) -> Guard | None:
    """A guard for a method whose changes to the weights add up; None for others, or if there is to be none."""
    if options is None or config.episodic or not isinstance(method, GradientMethod) or not method.accumulates:
        return None
    return Guard(method, options)


@dataclass
class _Standing:
    """What the guard goes by, and what it has decided so far."""

    clock: int = 0  # batches
    credit: float = 0.0  # forward passes of one image that it may still spend
    alarms: int = 0  # not yet forgiven
    total_alarms: int = 0
    calm: int = 0  # batches since the last alarm or pardon
    looked: int = 0
    doubting: bool = False
    warned: bool = False  # of an alarm that is not over
    retired: bool = False


class Guard:
    """Runs a method and watches what it does to the weights.

    Before a prediction is given out, the source model sees a part of the batch, too. Where its predictions on the
    frames of the reservoir tell more apart than the adapted ones, by the doubt threshold, the whole batch is answered
    by the source; beyond the alarm threshold the source weights come back, with a fresh optimizer and a lower
    learning rate. After too many alarms adaptation ends, and the source answers.

    Args:
        method: The method.
        options: When to act, and how.
    """

    def __init__(self, method: GradientMethod, options: GuardOptions | None = None) -> None:
        self.method = method
        self.options = options or GuardOptions()
        self.reservoir = Reservoir(self.options.size)
        self.from_source = False
        self._answered: tuple[Tensor, Tensor] | None = None  # images that `learn` is to adapt to, their logits
        self._now = _Standing()
        self._events: list[dict[str, Any]] = []

    @property
    def retired(self) -> bool:
        """Whether adaptation has ended for good."""
        return self._now.retired

    @property
    def standing(self) -> str:
        """What it thinks of the adapted weights: "trust", "doubt", or "retired" once adaptation has ended."""
        return "retired" if self.retired else "doubt" if self._now.doubting else "trust"

    @property
    def total_alarms(self) -> int:
        """Alarms so far."""
        return self._now.total_alarms

    @property
    def num_looked(self) -> int:
        """Forward passes of one image that it took beside the method's."""
        return self._now.looked

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, C) to answer with for preprocessed images (B, 3, H, W); the method then adapts to them.

        `from_source` says afterwards whether they are the source model's.
        """
        self.from_source = False
        if self.retired:
            return self._by_source(images)
        logits = self.method(images, labels)
        if not torch.isfinite(logits).all():
            self._roll_back("outputs that are not finite numbers")
            return self._by_source(images)
        self._now.clock += 1
        self._now.calm += 1
        self._look(images)
        return self._by_source(images) if self._judge() else logits

    def answer(self, images: Tensor) -> Tensor:
        """Logits (B, C) to answer with at once, by what was known before this batch; `learn` then adapts to it."""
        self.from_source = self.retired or (self._now.doubting and self.options.acts)
        if self.retired:
            return self._by_source(images)
        logits = self.method.answer(images)
        self._answered = images, logits
        return self._by_source(images) if self.from_source or not torch.isfinite(logits).all() else logits

    def learn(self) -> None:
        """Have the method adapt to the images of the last `answer`, and judge."""
        if self._answered is None:
            return
        images, logits = self._answered
        self._answered = None
        if not torch.isfinite(logits).all():
            self._roll_back("outputs that are not finite numbers")
            return
        self.method.learn()
        self._now.clock += 1
        self._now.calm += 1
        self._look(images)
        self._judge()

    def predict(self, images: Tensor) -> Tensor:
        """Logits (B, C) to answer with, without adapting: the source's while adaptation is in doubt or has ended."""
        self.from_source = self.retired or (self._now.doubting and self.options.acts)
        return self._by_source(images) if self.from_source else self.method.predict(images)

    def reset(self) -> None:
        """Note that the method is back at the source weights."""
        self.reservoir.back_to_source(self._now.clock)
        self._now.doubting = self._now.warned = False

    def most_bytes(self, num_values: int, num_classes: int) -> int:
        """What its state takes once the reservoir is full of images of so many values each, headers aside."""
        return self.options.size * (2 * num_values + 8 * num_classes)

    def events(self) -> list[dict[str, Any]]:
        """Decisions since the last call, with their numbers."""
        events, self._events = self._events, []
        return events

    def state(self) -> dict[str, Tensor]:
        """Everything its next decision depends on, beside the method's state."""
        standing = {name: torch.tensor(value, dtype=torch.float64) for name, value in asdict(self._now).items()}
        return {_PREFIX + name: tensor for name, tensor in {**standing, **self.reservoir.state()}.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; to be called before the method's own."""
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
        kinds = {name: type(value) for name, value in asdict(_Standing()).items()}
        self._now = _Standing(**{name: kind(own.pop(name).item()) for name, kind in kinds.items()})
        self.reservoir.load_state(own)
        self._set_learning_rate()

    def _look(self, images: Tensor) -> None:
        """Have the source model see some of the batch, and the adapted one frames that it saw long ago."""
        now, batch, views = self._now, len(images), self.method.last_views
        assert views is not None
        now.credit += self.options.cost * (self.method.num_forwards + self.method.num_backwards) * batch
        stale = self.reservoir.stale(now.clock - self.options.fresh, most=self.options.size)
        share = 0.5 if len(stale) else 1.0
        count = min(batch, int(share * now.credit))
        if not count and now.clock % 2:  # batches so small that frames to renew would take every single pass
            count = min(1, int(now.credit))
        if count:
            chosen = torch.linspace(0, batch - 1, count).round().long()
            now.credit -= count
            now.looked += count
            picked = images[chosen]
            self.reservoir.add(picked, self.method.predict_source(picked), views[0][chosen], now.clock)
        stale = self.reservoir.stale(now.clock - self.options.fresh, most=int(now.credit))
        if len(stale) >= min(_RENEWED_TOGETHER, int(now.credit)) > 0:
            now.credit -= len(stale)
            now.looked += len(stale)
            again = self.reservoir.images[stale].to(images)
            self.reservoir.renew(stale, self.method.predict_alone(again), now.clock)
        now.credit = min(now.credit, self.options.size)

    def _judge(self) -> bool:
        """Act on the reservoir; returns whether the source is to answer."""
        now, options = self._now, self.options
        drift = self.method.drift()
        if drift > options.most_drift:
            self._roll_back("weights far from the source's", drift=drift)
            return options.acts
        if len(self.reservoir) < options.least:
            return False
        gap, information = information_gap(self.reservoir.adapted, self.reservoir.source)
        if not math.isfinite(gap):
            self._roll_back("outputs that are not finite numbers", drift=drift)
            return options.acts
        share = gap / max(information, _LEAST_INFORMATION)
        if share < -options.alarm:
            self._roll_back("the adapted predictions tell less apart", gap=gap, information=information, drift=drift)
            return options.acts
        doubting = share < -options.doubt
        if doubting != now.doubting:
            what = "doubt" if doubting else "trust"
            self._note(what, gap=gap, information=information, drift=drift)
        now.doubting = doubting
        now.warned = now.warned and doubting
        if now.calm >= options.forgive_after and now.alarms:
            now.alarms, now.calm = now.alarms - 1, 0
            self._set_learning_rate()
            self._note("pardon", gap=gap, information=information, drift=drift)
        return doubting and options.acts

    def _roll_back(self, reason: str, **numbers: float) -> None:
        now = self._now
        if not self.options.acts:  # what is not undone would be an alarm at every batch
            if not now.warned:
                now.total_alarms += 1
                self._note("warning", reason=reason, **numbers)
            now.doubting = now.warned = True
            return
        now.total_alarms += 1
        now.alarms, now.calm, now.doubting = now.alarms + 1, 0, False
        now.retired = now.alarms > self.options.retries
        self._set_learning_rate()
        self.method.reset()
        self.reservoir.back_to_source(now.clock)
        self._note("retired" if now.retired else "rollback", reason=reason, **numbers)

    def _set_learning_rate(self) -> None:
        self.method.scale_lr(self.options.lr_factor**self._now.alarms)

    def _by_source(self, images: Tensor) -> Tensor:
        self.from_source = True
        self._now.looked += len(images)
        return self.method.predict_source(images)

    def _note(self, event: str, **details: Any) -> None:
        numbers = {name: round(value, 6) if isinstance(value, float) else value for name, value in details.items()}
        standing = {"alarms": self._now.alarms, "lr_scale": self.options.lr_factor**self._now.alarms}
        rest = {"frames": len(self.reservoir), "action": self.options.action}
        self._events.append({"event": event, **numbers, **standing, **rest})


def describe(event: Mapping[str, Any]) -> str:
    """An event of the guard as a sentence."""
    kind, numbers = event["event"], ""
    if "gap" in event:
        gap, side = event["gap"], "above" if event["gap"] > 0 else "below"
        numbers = f" (information {abs(gap):.3f} nats {side} the source's {event['information']:.3f})"
    warns = event["action"] == "warn"
    if kind == "doubt":
        return f"{'' if warns else 'the source answers while '}adaptation is in doubt{numbers}"
    if kind == "trust":
        return f"{'adaptation is out of doubt' if warns else 'the adapted model answers again'}{numbers}"
    if kind == "pardon":
        return f"an alarm is forgiven, and the learning rate is {event['lr_scale']:g} of its value"
    outcome = {
        "warning": "the guard only warns, and nothing is undone",
        "rollback": f"back to the source weights, at {event['lr_scale']:g} of the learning rate",
        "retired": "the run ends here" if event["action"] == "stop" else "adaptation ends, and the source answers",
    }[kind]
    return f"{event['reason']}{numbers}: {outcome}"
