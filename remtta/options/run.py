"""How a stream is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from remtta.errors import UsageError, check, check_finite
from remtta.options.guard import GuardOptions
from remtta.options.option import Fixed, Option, check_options, documented, read_size

_method = partial(Option, panel="Method")
_answers = partial(Option, panel="Answers and guard")
_output = partial(Option, panel="Output and running")

DEFAULT_BATCH_SIZE = 50
"""Images per update on ImageNet-C in the paper (implementation details, appendix)."""

Smooth = Literal["off", "auto"]
Adapt = Literal["always", "auto"]
Engine = Literal["processes", "ray"]
_BY_METHOD = GuardOptions()
MOST_SEED = 2**63 - 1


@documented
@dataclass(frozen=True)
class RunOptions:
    """How a stream is run; the method has its own settings.

    `guard` is None where the adapted model is to answer and harm is never undone. `topk` classes are listed per
    prediction. State and delta are saved after `save_every_s` seconds, however few updates there were.
    """

    batch_size: Annotated[int, _method("Frames per update.", flags=("--batch-size", "-b"), min=1, common=True)] = (
        DEFAULT_BATCH_SIZE
    )
    adapt: Annotated[
        Adapt,
        _method(
            "always: learn from every batch; auto: from what is new, and only now and then from more of the same, "
            "whose frames then cost one forward pass.",
            more="performance.md#only-what-teaches-something",
        ),
        Fixed(),
    ] = "always"
    reset_every: Annotated[
        int | None,
        _method("Back to the source weights after so many frames (whole batches).", min=1, metavar="N"),
        Fixed(),
    ] = None
    adapt_for: Annotated[
        int | None,
        _method("Learn from the first N frames (whole batches), then only predict.", min=1, metavar="N"),
        Fixed(),
    ] = None
    guard: Annotated[GuardOptions | None, Fixed()] = _BY_METHOD
    smooth: Annotated[
        Smooth,
        _answers(
            "auto: where frames come in order, as on video, answers go by the frames before, too.",
            common=True,
            more="estimates.md#time-tells",
        ),
        Fixed(),
    ] = "off"
    estimate: Annotated[
        float | None,
        _answers(
            "Estimate the accuracy on the last 500 frames, for a model with this one on clean images; --source-data "
            "with some of those, unlabelled, makes it better.",
            metavar="SHARE",
            more="estimates.md#how-good-is-it-now",
        ),
        Fixed(),
    ] = None
    expire_below: Annotated[
        float | None,
        _answers("An event and a warning where the estimate for the answers is below this.", metavar="SHARE"),
    ] = None
    overwrite: Annotated[bool, _output("Replace an earlier run in the folder.", common=True)] = False
    resume: Annotated[
        bool,
        _output(
            "Go on with the run in --output as if it had not stopped, or begin it if there is none.",
            common=True,
            more="reliability.md",
        ),
    ] = False
    replay: Annotated[
        bool,
        _output(
            "With --resume and --predictions -: first pass on again what the reader may not have had.",
            more="reliability.md#nothing-is-lost",
        ),
    ] = False
    topk: Annotated[int, Fixed()] = 5
    logits: Annotated[bool, _output("Write all logits."), Fixed()] = False
    save_every: Annotated[
        int,
        _output("Updates between saves of state and delta; after half a minute they are saved all the same.", min=1),
    ] = 20
    save_every_s: float = 30.0
    save_full: Annotated[bool, _output("Save a delta also where every weight changes.")] = False
    max_ms: Annotated[
        float | None, _output("Mean time per frame in ms: updates are left out to keep it, never predictions.", above=0)
    ] = None
    realtime: Annotated[
        bool, _output("Leave out updates, never predictions, while a video or live source runs ahead.")
    ] = False
    latency: Annotated[bool, _output("Hand out predictions before the update on their batch begins."), Fixed()] = False
    flush_after: Annotated[
        float | None,
        _output(
            "Predict frames that have waited so long for their batch to be full; they are learned from with it.",
            metavar="SECONDS",
            min=0,
            default="never",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        _output("Memory to keep within, such as 2G: so many images at a time as fit.", metavar="SIZE", read=read_size),
    ] = None
    on_error: Annotated[Literal["skip", "stop"], _output("At a frame that cannot be read.")] = "skip"
    seed: Annotated[int, _output("Seed of every random choice.", min=0, max=MOST_SEED), Fixed()] = 0

    def __post_init__(self) -> None:
        check_options(self)
        check(self.topk >= 1, "topk", self.topk, ">= 1")
        if self.flush_after is not None:
            check_finite(self.flush_after, "seconds before a flush", ">= 0")
        check_finite(self.save_every_s, "seconds between saves", "> 0")
        if self.estimate is not None:
            check(0 < self.estimate < 1, "estimate", self.estimate, "an accuracy above 0 and below 1")
        if self.expire_below is not None:
            if self.estimate is None:
                raise UsageError("--expire-below goes by an estimate; add --estimate with the accuracy on clean images")
            below = 0 < self.expire_below < self.estimate
            check(below, "expire_below", self.expire_below, "above 0 and below the estimate")
        if self.overwrite and self.resume:
            raise UsageError("--overwrite replaces a run and --resume goes on with it; choose one")
