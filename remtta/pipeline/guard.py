"""The guard: weights the models' predictions, and decides without labels when adaptation does harm."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.source import CenteredSource, Source
from remtta.models.weights import AdaptedWeights
from remtta.options import GuardOptions
from remtta.pipeline.information import PredictionWindow, information_gap_of

_log = logging.getLogger(__name__)

_STORED = {"disabled": "retired"}
"""Names in states of fields of `HarmStatus` that were renamed since."""

NOT_FINITE = "outputs that are not finite numbers"


class Verdict(NamedTuple):
    """The guard's decision on a batch before it is learned from."""

    weight: float  # the adapted model's in the batch's predictions, 0 to 1
    harmful: bool  # whether the source model predicts, and its weights are to be restored instead of an update


@dataclass
class HarmStatus:
    """The guard's state: evidence that the stream has given so far."""

    unjudged: int = 0  # frames since the last comparison
    lead: float = 0.0  # relative lead of the adapted model at the last verdict
    alarms: int = 0  # not yet forgiven
    total_alarms: int = 0
    calm: int = 0  # frames since the last alarm or pardon
    doubted: int = 0  # frames since the doubt began
    doubting: bool = False
    warned: bool = False  # of the current alarm
    disabled: bool = False  # adaptation has ended for good


def guard_for(method: Method[MethodConfig], options: GuardOptions | None) -> Guard | None:
    """Return a guard for a method, or None if it would have nothing to do; see `Guard`.

    Harm can only be undone for a method with lasting changes to the weights; predictions can be averaged for any method
    whose predictions differ from the source model's.
    """
    config = method.config
    forgets = config.episodic and config.prediction_step == "first"  # and predicts before it learns
    same = isinstance(method, CenteredSource) and not method.model.batch_norms.mixes  # as the source model, centered
    if options is None or type(method) is Source or forgets or same:
        return None
    options = options.filled()
    if not method.keeps_updates:
        options = replace(options, action="off")
    return None if (options.action, options.answer) == ("off", "adapted") else Guard(options)


class Guard:
    """Weights the adapted model's predictions by a comparison of both models' predictions of the last frames.

    If the adapted model is far behind the source model, or in doubt for long, the source weights are restored, with a
    fresh optimizer and a lower learning rate. After too many alarms adaptation ends, and the source model predicts.

    Attributes:
        options: Its options, with all defaults filled in.
        watches: Whether it does more than weight predictions.
        window: The last frames, as both models predict them.
        status: Its counts and judgment so far.
    """

    def __init__(self, options: GuardOptions) -> None:
        self.options = options.filled()
        self.watches = self.options.action != "off"
        self.window = PredictionWindow(self.options.window, self.options.class_history)
        self.status = HarmStatus()
        self._events: list[dict[str, Any]] = []

    @property
    def weight(self) -> float:
        """The adapted model's present weight in predictions."""
        if self.status.disabled:
            return 0.0
        if self.options.answer == "both":
            return 0.5
        return 0.0 if self.status.doubting and self.options.acts else 1.0

    @property
    def lr_scale(self) -> float:
        return self.options.lr_factor**self.status.alarms

    def judge(self, source: Tensor, adapted: Tensor, weights: AdaptedWeights) -> Verdict:
        """Judge a batch before it is learned from.

        Args:
            source: The source model's centered logits (B, C).
            adapted: The adapted model's centered logits of the same frames.
            weights: The adapted weights.
        """
        finite = torch.isfinite(source).all(1)
        if self.watches and not torch.isfinite(adapted[finite]).all():
            harmful = self.alarm(NOT_FINITE)
        elif not finite.all():
            harmful = False  # the images are at fault, or the checkpoint: they say nothing about the adaptation
        else:
            harmful = self.compare(source, adapted, weights.drift() if self.watches else 0.0)
        return Verdict(0.0 if harmful else self.weight, harmful)

    def rejects(self, weights: AdaptedWeights) -> bool:
        """Return whether an update moved weights too far from the source's, which are to be restored then."""
        if not self.watches:
            return False
        drift = weights.drift()
        return drift > self.options.most_drift and self.alarm("weights far from the source's", drift=drift)

    @property
    def state(self) -> str:
        """Judgment of the adapted weights: "trust", "doubt", or "retired" once adaptation has ended."""
        return "retired" if self.status.disabled else "doubt" if self.status.doubting else "trust"

    def compare(self, source: Tensor, adapted: Tensor, drift: float) -> bool:
        """Reach a verdict; return True to restore the source weights, and predict with them.

        Args:
            source: The source model's logits (B, C).
            adapted: The adapted model's logits of the same frames.
            drift: Distance of the weights from the source weights.
        """
        status, options = self.status, self.options
        self.window.add(source, adapted)
        status.unjudged += len(source)
        status.calm += len(source)
        status.doubted += len(source) * status.doubting
        if len(self.window.source) < options.min_frames or status.unjudged < options.check_every:
            return False
        status.unjudged = 0
        evidence = information_gap_of(self.window)
        numbers = {**asdict(evidence), "drift": drift}
        if not math.isfinite(evidence.gap):
            return self.alarm(NOT_FINITE, drift=drift)
        status.lead = evidence.lead
        if evidence.lead < -options.alarm:
            return self.alarm("the adapted predictions carry less information", **numbers)
        doubting = evidence.lead < -options.doubt
        if doubting != status.doubting:
            status.doubting, status.doubted = doubting, 0
            self._note("doubt" if doubting else "trust", **numbers)
        status.warned = status.warned and doubting
        if status.doubted >= options.patience and options.acts:
            self.reset()
            self._note("restart", **numbers)
            return True
        if status.calm >= options.forgive_after and status.alarms:
            status.alarms, status.calm = status.alarms - 1, 0
            self._note("pardon", **numbers)
        return False

    def alarm(self, reason: str, **numbers: float) -> bool:
        """Raise an alarm; return whether to restore the source weights."""
        status = self.status
        if not self.options.acts:  # without undoing harm, every batch would raise an alarm
            status.lead = numbers.get("lead", -math.inf)
            if not status.warned:
                status.total_alarms += self.options.action == "warn"
                self._note("warning", reason=reason, **numbers)
            status.doubting = status.warned = True
            return False
        status.total_alarms += 1
        status.alarms, status.calm = status.alarms + 1, 0
        status.disabled = status.alarms > self.options.retries
        self.reset()
        self._note("retired" if status.disabled else "rollback", reason=reason, **numbers)
        return True

    def reset(self) -> None:
        """Record that the weights are the source's again."""
        self.window.back_to_source()
        status = self.status
        status.doubting = status.warned = False
        status.doubted, status.lead = 0, 0.0

    def start_new_stream(self) -> None:
        """Forget all frames and alarms, for an independent stream; only the number of alarms remains."""
        self.window = PredictionWindow(self.options.window, self.options.class_history)
        self.status = HarmStatus(total_alarms=self.status.total_alarms)

    def events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def state_dict(self) -> dict[str, Tensor]:
        own = asdict(self.status).items()
        numbers = {_STORED.get(name, name): torch.tensor(value, dtype=torch.float64) for name, value in own}
        return {**numbers, **self.window.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        kinds = {name: type(value) for name, value in asdict(HarmStatus()).items()}
        self.status = HarmStatus(**{name: kind(state[_STORED.get(name, name)].item()) for name, kind in kinds.items()})
        self.window.load_state_dict(state)

    def _note(self, event: str, **details: Any) -> None:
        if self.options.action == "off":
            return
        finite = {k: v for k, v in details.items() if not isinstance(v, float) or math.isfinite(v)}
        numbers = {k: round(v, 6) if isinstance(v, float) else v for k, v in finite.items()}
        counts = {"alarms": self.status.alarms, "lr_scale": self.lr_scale}
        rest = {"frames": len(self.window.source), "action": self.options.action, "answer": self.options.answer}
        self._events.append({"event": event, **numbers, **counts, **rest})
