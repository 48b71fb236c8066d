"""Options of the guard: the model that predicts, and the response to harmful adaptation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.errors import check
from remtta.options.option import check_options, documented, in_answers

Action = Literal["off", "warn", "rollback", "stop"]
Answer = Literal["adapted", "both"]


@documented
@dataclass(frozen=True)
class GuardOptions:
    """Options of the guard: the model that predicts, and the response to harmful adaptation.

    Attributes:
        window: Number of frames on which a verdict is based.
        memory: Number of frames from which a dominant class is detected.
        least: Minimum number of frames in the window for a verdict.
        renewed: Number of new frames between verdicts.
        doubt: How far the adapted model may fall behind before it is in doubt, relative to the mutual information of
            the source model's predictions.
        alarm: How far it may fall behind before an alarm.
        patience: Number of frames in doubt after which the source weights are restored, without an alarm.
        lr_factor: Factor for the learning rate at each alarm.
        forgive_after: Number of frames without an alarm after which one is forgiven.
        most_drift: Norm of the change relative to the norm of the weights that raises an alarm by itself.
    """

    action: Annotated[
        Action | None,
        in_answers(
            "What to do if adaptation does harm: warn only, restore the source weights (rollback), or also end the run "
            "after the last retry (stop).",
            flags=("--guard",),
            default="by the method: rollback for remtta and light, else off",
            common=True,
            more="guard.md",
        ),
    ] = None
    answer: Annotated[
        Answer | None,
        in_answers(
            "Model that answers: the adapted one, or both, by the mean of their probabilities.",
            default="by the method: both for remtta, light and, with batch norms, fast, else adapted",
            common=True,
            more="guard.md#who-answers",
        ),
    ] = None
    retries: Annotated[
        int, in_answers("Number of rollbacks; the next alarm ends adaptation.", flags=("--guard-retries",), min=0)
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
        """True if it acts on harm instead of only reporting it."""
        return self.action in ("rollback", "stop")

    def filled(self, action: Action = "rollback", answer: Answer = "adapted") -> GuardOptions:
        """Return a copy with the action and answer that were left open."""
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
