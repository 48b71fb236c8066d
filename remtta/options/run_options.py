"""Options of a run over a stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.errors import UsageError, check
from remtta.options.guard_options import GuardOptions
from remtta.options.option import Bounds, Fixed, check_options, documented, in_answers, in_method, in_output, read_size

DEFAULT_BATCH_SIZE = 50
"""Images per update on ImageNet-C in the paper (implementation details, appendix)."""

Smooth = Literal["off", "auto"]
Engine = Literal["processes", "ray"]
_BY_METHOD = GuardOptions()
MAX_SEED = 2**63 - 1


@documented
@dataclass(frozen=True)
class RunOptions:
    """Options of a run over a stream; the method has its own settings.

    `guard` is a `GuardOptions(action, answer)`; with None, the adapted model predicts and harm is never undone. Each
    prediction lists the `topk` likeliest classes.
    State and delta are saved after `save_every_s` seconds even without `save_every` updates.
    """

    batch_size: Annotated[int, in_method("Frames per update.", flags=("--batch-size", "-b"), min=1, common=True)] = (
        DEFAULT_BATCH_SIZE
    )
    reset_every: Annotated[
        int | None,
        in_method("Restore the source weights each time N frames have been learned from.", min=1, metavar="N"),
        Fixed(),
    ] = None
    adapt_for: Annotated[
        int | None,
        in_method("Learn from the first N frames, in whole batches, then only predict.", min=1, metavar="N"),
        Fixed(),
    ] = None
    guard: Annotated[GuardOptions | None, Fixed()] = _BY_METHOD
    smooth: Annotated[
        Smooth,
        in_answers(
            "auto: smooth predictions over time while consecutive frames are related, as in video.",
            common=True,
            more="estimates.md#smoothing-over-time",
        ),
        Fixed(),
    ] = "off"
    estimate: Annotated[
        float | None,
        in_answers(
            "Estimate the accuracy over the last 500 frames, given the model's accuracy on clean images (0 to 1); "
            "unlabelled clean images in --source-data make it more exact.",
            metavar="ACCURACY",
            common=True,
            more="estimates.md#estimated-accuracy",
        ),
        Fixed(),
    ] = None
    expire_below: Annotated[
        float | None, in_answers("Warn and record an event when the estimate falls below this.", metavar="ACCURACY")
    ] = None
    overwrite: Annotated[bool, in_output("Replace an earlier run in the folder.", common=True)] = False
    resume: Annotated[
        bool,
        in_output(
            "Continue the run in --output as if it had not stopped, or start it if there is none.",
            common=True,
            more="reliability.md",
        ),
    ] = False
    topk: Annotated[int, Bounds(min=1), Fixed()] = 5
    logits: Annotated[bool, in_output("Add all logits to each row."), Fixed()] = False
    save_every: Annotated[
        int, in_output("Save state and delta every N updates; they are also saved every 30 s.", metavar="N", min=1)
    ] = 20
    save_every_s: Annotated[float, Bounds(above=0, below=math.inf)] = 30.0
    save_full: Annotated[
        bool, in_output("Write a delta even if every weight changes; it is as large as the model.")
    ] = False
    max_ms: Annotated[
        float | None,
        in_output(
            "Mean time per frame in ms; updates are skipped to keep to it, predictions never.", above=0, below=math.inf
        ),
    ] = None
    realtime: Annotated[bool, in_output("Skip updates, never predictions, to keep up with a video or live source.")] = (
        False
    )
    latency: Annotated[bool, in_output("Output a batch's predictions before its update."), Fixed()] = False
    flush_after: Annotated[
        float | None,
        in_output(
            "Predict frames that have waited this long for a full batch; they are learned from later, in their batch.",
            metavar="SECONDS",
            min=0,
            below=math.inf,
            default="2 on cameras and network streams, else never",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        in_output("Memory limit, such as 2G; sets the largest micro-batch that fits.", metavar="SIZE", read=read_size),
    ] = None
    on_error: Annotated[Literal["skip", "stop"], in_output("What to do if a frame cannot be read.")] = "skip"
    seed: Annotated[int, in_output("Seed of every random choice.", min=0, max=MAX_SEED), Fixed()] = 0

    def __post_init__(self) -> None:
        check_options(self)
        check(self.guard is None or isinstance(self.guard, GuardOptions), "guard", self.guard, "GuardOptions or None")
        if self.estimate is not None:
            check(0 < self.estimate < 1, "estimate", self.estimate, "an accuracy above 0 and below 1, such as 0.82")
        if self.expire_below is not None:
            if self.estimate is None:
                raise UsageError(
                    "--expire-below compares with an estimate; add --estimate with the accuracy on clean images"
                )
            below = 0 < self.expire_below < self.estimate
            check(below, "expire_below", self.expire_below, "above 0 and below the estimate")
        if self.overwrite and self.resume:
            raise UsageError("--overwrite replaces a run and --resume continues it; choose one")
