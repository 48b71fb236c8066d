"""Events of the guard, the centering and the accuracy estimate, in words."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)

_QUIET = ("doubt", "trust", "pardon", "uncentered", "centered")  # not worth a warning
_KINDS = (*_QUIET, "expired", "restart", "warning", "rollback", "retired")


def log_event(event: Mapping[str, Any], place: str = "") -> None:
    """Log an event of the guard, the centering or the estimator, as a warning if it matters."""
    _log.log(logging.DEBUG if event["event"] in _QUIET else logging.WARNING, "%s%s", place, describe(event))


def describe(event: Mapping[str, Any]) -> str:
    """Return a sentence for an event of the guard, the centering or the estimator."""
    kind, numbers = event["event"], ""
    if kind not in _KINDS:
        return ", ".join(f"{name}: {value}" for name, value in event.items())
    if kind == "expired":
        return (
            f"the estimated accuracy of the last frames is {100 * event['estimate']:.1f} %, below "
            f"{100 * event['expire_below']:g} %: consider training the model again"
        )
    if kind == "uncentered":
        return "frames show few classes, so that most of the logits' mean is no longer subtracted"
    if kind == "centered":
        return "most of the logits' mean is subtracted again"
    if "gap" in event:
        gap, side = event["gap"], "above" if event["gap"] > 0 else "below"
        numbers = f" (mutual information {abs(gap):.3f} nats {side} the source's {event['information']:.3f})"
    warns = event["action"] == "warn"
    alone = event.get("answer", "adapted") == "adapted"
    if kind == "doubt":
        doubt = "the source model predicts while " if alone and not warns else ""
        return f"{doubt}adaptation is in doubt{numbers}"
    if kind == "trust":
        return f"{'the adapted model predicts again' if alone and not warns else 'adaptation is out of doubt'}{numbers}"
    if kind == "restart":
        return f"in doubt for too long{numbers}: back to the source weights"
    if kind == "pardon":
        return f"an alarm is forgiven; the learning rate is now {event['lr_scale']:g} of its original value"
    outcome = {
        "warning": "the guard only warns; nothing is undone",
        "rollback": f"back to the source weights, at {event['lr_scale']:g} of the learning rate",
        "retired": "the run ends here"
        if event["action"] == "stop"
        else "adaptation ends, and the source model predicts",
    }[kind]
    return f"{event['reason']}{numbers}: {outcome}"
