"""Who answers in `remtta adapt`, and what is known of the answers without labels."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import typer

from remtta.cli.options.method import MethodOptions
from remtta.errors import UsageError
from remtta.methods.settings.presets import preset_of
from remtta.options import Action, Answer, GuardOptions, RunOptions, Smooth

_option = partial(typer.Option, rich_help_panel="Stream and output")

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class AnswerOptions:
    """Who answers, what guards the answers against harm, and how good they are."""

    answer: Annotated[
        Answer | None,
        _option(
            help="Who answers: the adapted model, both (the mean of its and the source model's probabilities), or "
            "auto, weighted by who sees more in the last frames. Default: by the preset, auto or adapted.",
        ),
    ] = None
    smooth: Annotated[
        Smooth,
        _option(help="auto: where frames come in order, as on video, answers go by the frames before, too."),
    ] = RunOptions.smooth
    estimate: Annotated[
        float | None,
        _option(
            metavar="SHARE",
            help="Estimate the accuracy on the last 500 frames, for a model with this one on clean images; "
            "--source-data with some of those, unlabelled, makes it better.",
        ),
    ] = RunOptions.estimate
    expire_below: Annotated[
        float | None,
        _option(metavar="SHARE", help="Tell, by an event and a warning, where the estimate for the answers is below."),
    ] = RunOptions.expire_below
    each: Annotated[bool, _option("--each", help="Write what the adapted and the source model said by themselves.")] = (
        RunOptions.each
    )
    guard: Annotated[
        Action | None,
        _option(
            help="What to do when adaptation does harm: tell, go back to the source weights, or the same and end the "
            "run when the retries are used up. Default: by the preset, rollback or off.",
        ),
    ] = None
    guard_retries: Annotated[int, _option(min=0, help="Rollbacks; the alarm after them ends adaptation.")] = (
        GuardOptions.retries
    )

    def guard_options(self, method: MethodOptions) -> GuardOptions:
        """What --guard, --guard-retries and --answer ask for, or the method's preset.

        Raises:
            UsageError: If both models' answers are asked for, and one answers.
        """
        preset = preset_of(method.preset)
        answer = self.answer or preset.answer
        if self.each and answer == "adapted":
            raise UsageError(
                "--each writes what both models said, and only the adapted one answers; add --answer auto or both"
            )
        if self.answer not in (None, "adapted") and not method.adapts:
            _log.warning("--answer %s changes nothing: %s is the source model", self.answer, method.name)
        return GuardOptions(action=self.guard or preset.action, answer=answer, retries=self.guard_retries)
