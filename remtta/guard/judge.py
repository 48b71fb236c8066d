"""Decide from the last frames which model predicts, and when harm is undone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from remtta.guard.evidence import Window, evidence_of
from remtta.options import GuardOptions

_log = logging.getLogger("remtta")

NOT_FINITE = "outputs that are not finite numbers"


@dataclass
class JudgeState:
    """The judge's state, apart from the window."""

    unjudged: int = 0  # frames since the last verdict
    lead: float = 0.0  # relative lead of the adapted model at the last verdict
    alarms: int = 0  # not yet forgiven
    total_alarms: int = 0
    calm: int = 0  # frames since the last alarm or pardon
    doubted: int = 0  # frames since the doubt began
    doubting: bool = False
    warned: bool = False  # of the current alarm
    retired: bool = False  # adaptation has ended for good


class Judge:
    """Holds the window of the last frames, weights the models by it, and raises alarms.

    Attributes:
        window: The last frames, as both models predict them.
        now: Its counts and verdict so far.
    """

    def __init__(self, options: GuardOptions) -> None:
        self.window = Window(options.window, options.memory)
        self._options = options.filled()
        self.now = JudgeState()
        self._events: list[dict[str, Any]] = []

    @property
    def verdict(self) -> str:
        """Judgment of the adapted weights: "trust", "doubt", or "retired" once adaptation has ended."""
        return "retired" if self.now.retired else "doubt" if self.now.doubting else "trust"

    @property
    def lr_scale(self) -> float:
        """Factor for the learning rate."""
        return self._options.lr_factor**self.now.alarms

    @property
    def weight(self) -> float:
        """The adapted model's current weight in predictions."""
        now, options = self.now, self._options
        if now.retired:
            return 0.0
        if options.answer == "both":
            return 0.5
        return 0.0 if now.doubting and options.acts else 1.0

    def judge(self, source: Tensor, adapted: Tensor, num_frames: int, drift: float) -> bool:
        """Reach a verdict; return True to restore the source weights, and predict with them.

        Args:
            source: The source model's logits (B, C).
            adapted: The adapted model's logits of the same frames.
            num_frames: Frames since the last call, including those that only the adapted model has seen.
            drift: Distance of the weights from the source weights.
        """
        now, options = self.now, self._options
        self.window.add(source, adapted)
        now.unjudged += len(source)
        now.calm += num_frames
        now.doubted += num_frames * now.doubting
        if drift > options.most_drift:
            return self.alarm("weights far from the source's", drift=drift)
        if len(self.window.source) < options.least or now.unjudged < options.renewed:
            return False
        now.unjudged = 0
        evidence = evidence_of(self.window)
        numbers = {**asdict(evidence), "drift": drift}
        if not math.isfinite(evidence.gap):
            return self.alarm(NOT_FINITE, drift=drift)
        now.lead = evidence.lead
        if evidence.lead < -options.alarm:
            return self.alarm("the adapted predictions carry less information", **numbers)
        doubting = evidence.lead < -options.doubt
        if doubting != now.doubting:
            now.doubting, now.doubted = doubting, 0
            self._note("doubt" if doubting else "trust", **numbers)
        now.warned = now.warned and doubting
        if now.doubted >= options.patience and options.acts:
            self.reset()
            self._note("restart", **numbers)
            return True
        if now.calm >= options.forgive_after and now.alarms:
            now.alarms, now.calm = now.alarms - 1, 0
            self._note("pardon", **numbers)
        return False

    def alarm(self, reason: str, **numbers: float) -> bool:
        """Raise an alarm; return whether to restore the source weights."""
        now = self.now
        if not self._options.acts:  # without undoing harm, every batch would raise an alarm
            now.lead = numbers.get("lead", -math.inf)
            if not now.warned:
                now.total_alarms += self._options.action == "warn"
                self._note("warning", reason=reason, **numbers)
            now.doubting = now.warned = True
            return False
        now.total_alarms += 1
        now.alarms, now.calm = now.alarms + 1, 0
        now.retired = now.alarms > self._options.retries
        self.reset()
        self._note("retired" if now.retired else "rollback", reason=reason, **numbers)
        return True

    def reset(self) -> None:
        """Record that the weights are the source's again."""
        self.window.back_to_source()
        now = self.now
        now.doubting = now.warned = False
        now.doubted, now.lead = 0, 0.0

    def restart(self) -> None:
        """Forget all frames and alarms, for an independent stream; only the number of alarms remains."""
        self.window = Window(self._options.window, self._options.memory)
        self.now = JudgeState(total_alarms=self.now.total_alarms)

    def events(self) -> list[dict[str, Any]]:
        """Return the decisions since the last call, with their numbers."""
        events, self._events = self._events, []
        return events

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next decision depends on."""
        own = {name: torch.tensor(value, dtype=torch.float64) for name, value in asdict(self.now).items()}
        return {**own, **self.window.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        kinds = {name: type(value) for name, value in asdict(JudgeState()).items()}
        self.now = JudgeState(**{name: kind(state[name].item()) for name, kind in kinds.items()})
        self.window.load_state(state)

    def _note(self, event: str, **details: Any) -> None:
        if self._options.action == "off":
            return
        finite = {k: v for k, v in details.items() if not isinstance(v, float) or math.isfinite(v)}
        numbers = {k: round(v, 6) if isinstance(v, float) else v for k, v in finite.items()}
        counts = {"alarms": self.now.alarms, "lr_scale": self.lr_scale}
        rest = {"frames": len(self.window.source), "action": self._options.action, "answer": self._options.answer}
        self._events.append({"event": event, **numbers, **counts, **rest})


_QUIET = ("doubt", "trust", "pardon")  # not worth a warning


def log_event(event: Mapping[str, Any], place: str = "") -> None:
    """Log an event of the guard or the estimator, as a warning if it matters."""
    _log.log(logging.DEBUG if event["event"] in _QUIET else logging.WARNING, "%s%s", place, describe(event))


def describe(event: Mapping[str, Any]) -> str:
    """Return a sentence for an event of the guard or the estimator."""
    kind, numbers = event["event"], ""
    if kind == "expired":
        return (
            f"the estimated accuracy of the last frames is {100 * event['estimate']:.1f} %, below "
            f"{100 * event['expire_below']:g} %: consider training the model again"
        )
    if "gap" in event:
        gap, side = event["gap"], "above" if event["gap"] > 0 else "below"
        numbers = f" (mutual information {abs(gap):.3f} nats {side} the source's {event['information']:.3f})"
    warns = event["action"] == "warn"
    alone = event.get("answer", "adapted") == "adapted"
    if kind == "doubt":
        doubt = "the source model answers while " if alone and not warns else ""
        return f"{doubt}adaptation is in doubt{numbers}"
    if kind == "trust":
        return f"{'the adapted model answers again' if alone and not warns else 'adaptation is out of doubt'}{numbers}"
    if kind == "restart":
        return f"in doubt for too long{numbers}: back to the source weights"
    if kind == "pardon":
        return f"an alarm is forgiven; the learning rate is now {event['lr_scale']:g} of its original value"
    outcome = {
        "warning": "the guard only warns; nothing is undone",
        "rollback": f"back to the source weights, at {event['lr_scale']:g} of the learning rate",
        "retired": "the run ends here"
        if event["action"] == "stop"
        else "adaptation ends, and the source model answers",
    }[kind]
    return f"{event['reason']}{numbers}: {outcome}"
