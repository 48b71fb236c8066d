"""Who answers, and what is done about an adaptation that does harm."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from remtta.errors import check
from remtta.options.option import Option, check_options

_answers = partial(Option, panel="Answers and guard")

Action = Literal["off", "warn", "rollback", "stop"]
Answer = Literal["adapted", "both"]


@dataclass(frozen=True)
class GuardOptions:
    """Who answers, and what is done about an adaptation that does harm.

    Attributes:
        answer: "adapted", or "both", the mean of the adapted and the source
            model's probabilities. None for what goes with the method's name.
        action: "rollback" to the source weights, "stop" for that and an end
            of the run when the retries are used up, "warn" to only tell, or
            "off". None as for `answer`.
        retries: Alarms that are rolled back; the next one ends adaptation.
        window: Frames that are looked at together.
        memory: Frames by which a camera is known to look at one class only.
        least: Frames in the window before there is a verdict.
        renewed: New frames after which there is another.
        doubt: How far the adapted model may be behind, as a share of what the
            source's predictions tell apart, before it is in doubt.
        alarm: How far behind is an alarm.
        patience: Frames of doubt after which the source weights come back, which is no alarm.
        lr_factor: What an alarm multiplies the learning rate by.
        forgive_after: Frames without an alarm after which one is forgiven.
        most_drift: Norm of the change over the norm of the weights that is
            an alarm by itself.
    """

    action: Annotated[
        Action | None,
        _answers(
            "What to do when adaptation does harm: warn, restore the source weights (rollback), or also end "
            "the run after the last retry (stop).",
            flags=("--guard",),
            default="by the method: rollback for remtta, else off",
            common=True,
            more="guard.md",
        ),
    ] = None
    answer: Annotated[
        Answer | None,
        _answers(
            "Who answers: the adapted model, or both: the mean of its and the source model's probabilities.",
            default="by the method: both for remtta, else adapted",
            common=True,
            more="guard.md#who-answers",
        ),
    ] = None
    retries: Annotated[
        int, _answers("Rollbacks; the alarm after them ends adaptation.", flags=("--guard-retries",), min=0)
    ] = 8
    window: int = 100
    memory: int = 1000
    least: int = 32
    renewed: int = 10
    doubt: float = 0.04
    alarm: float = 0.3
    patience: int = 500
    lr_factor: float = 0.5
    forgive_after: int = 10_000
    most_drift: float = 0.5

    @property
    def acts(self) -> bool:
        """Whether it does more than tell."""
        return self.action in ("rollback", "stop")

    def filled(self, action: Action = "rollback", answer: Answer = "adapted") -> GuardOptions:
        """The same with these in place of what was left open."""
        return dataclasses.replace(self, action=self.action or action, answer=self.answer or answer)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("memory", "renewed", "patience", "forgive_after"):
            check(getattr(self, name) >= 1, f"the guard's {name.replace('_', ' ')}", getattr(self, name), ">= 1")
        check(
            2 <= self.least <= self.window, "the guard's least frames", self.least, f"in 2 to its {self.window} frames"
        )
        check(0 < self.doubt <= self.alarm, "the guard's doubt", self.doubt, "> 0 and at most its alarm")
        check(0 < self.most_drift < math.inf, "the guard's most drift", self.most_drift, "> 0 and finite")
        check(0 < self.lr_factor <= 1, "the guard's lr factor", self.lr_factor, "in (0, 1]")
