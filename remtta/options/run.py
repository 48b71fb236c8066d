"""How a stream is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.errors import UsageError, check, check_finite
from remtta.options.guard import GuardOptions
from remtta.options.option import Fixed, Option, check_options, read_size

DEFAULT_BATCH_SIZE = 50
"""Images per update on ImageNet-C in the paper (implementation details, appendix)."""

Smooth = Literal["off", "auto"]
Adapt = Literal["always", "auto"]
_BY_METHOD = GuardOptions()
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class RunOptions:
    """How a stream is run; the method has its own settings.

    Attributes:
        batch_size: Frames per update; the last batch may be smaller.
        adapt: "auto" leaves out updates that teach next to nothing: those on more of the same; "always" none.
        reset_every: Go back to the source weights before the first batch
            after this many frames, so after whole batches; None for never.
        guard: Who answers, and when harm is undone, by methods that train
            weights and in no episodic run; None for the adapted model, and never.
        smooth: "auto" has answers go by the frames before, too, where frames come in order; "off" never.
        estimate: Accuracy of the model on clean images, from which that of the last frames is estimated; None for no
            estimate.
        expire_below: Estimated accuracy of the answers below which an event tells to train the model again.
        overwrite: Replace an earlier run in the same folder.
        resume: Go on with the run in the folder, or begin it if there is none.
        replay: When going on, first pass on again what the reader of the predictions may not have had.
        topk: Classes listed per prediction.
        logits: Write all logits as well.
        each: Write what the adapted and the source model said, where both were asked.
        save_every: Updates between two saves of state and delta.
        save_every_s: Seconds after which they are saved all the same.
        save_full: Save a delta also of a method that changes every weight,
            which is as large as the model.
        max_ms: Mean time per frame in ms; updates are left out to keep it.
        realtime: Leave out updates while a video's or live source's own time
            has run ahead.
        latency: Write predictions before the update on their batch begins.
        flush_after: Seconds after which frames that wait for their batch to be full are predicted all the same;
            they are learned from with the whole batch. None for never.
        max_memory: Most bytes the process, or the GPU, is to need: the
            micro-batch is chosen by it where the config leaves it open.
        on_error: "skip" or "stop" at a frame that cannot be read.
        seed: Seeds torch before the first frame.
    """

    batch_size: Annotated[
        int, Option("Frames per update.", flags=("--batch-size", "-b"), min=1, panel="Method", common=True)
    ] = DEFAULT_BATCH_SIZE
    adapt: Annotated[
        Adapt,
        Option(
            "always: learn from every batch; auto: from what is new, and only now and then from more of the same, "
            "whose frames then cost one forward pass.",
            panel="Method",
            more="performance.md#only-what-teaches-something",
        ),
        Fixed(),
    ] = "always"
    reset_every: Annotated[
        int | None,
        Option("Back to the source weights after so many frames (whole batches).", min=1, metavar="N", panel="Method"),
        Fixed(),
    ] = None
    guard: Annotated[GuardOptions | None, Fixed()] = _BY_METHOD
    smooth: Annotated[
        Smooth,
        Option(
            "auto: where frames come in order, as on video, answers go by the frames before, too.",
            panel="Answers and guard",
            common=True,
            more="estimates.md#time-tells",
        ),
        Fixed(),
    ] = "off"
    estimate: Annotated[
        float | None,
        Option(
            "Estimate the accuracy on the last 500 frames, for a model with this one on clean images; --source-data "
            "with some of those, unlabelled, makes it better.",
            metavar="SHARE",
            panel="Answers and guard",
            more="estimates.md#how-good-is-it-now",
        ),
        Fixed(),
    ] = None
    expire_below: Annotated[
        float | None,
        Option(
            "An event and a warning where the estimate for the answers is below this.",
            metavar="SHARE",
            panel="Answers and guard",
        ),
    ] = None
    overwrite: Annotated[
        bool,
        Option("Replace an earlier run in the folder.", panel="Output and running", common=True),
    ] = False
    resume: Annotated[
        bool,
        Option(
            "Go on with the run in --output as if it had not stopped, or begin it if there is none.",
            panel="Output and running",
            common=True,
            more="reliability.md",
        ),
    ] = False
    replay: Annotated[
        bool,
        Option(
            "With --resume and --predictions -: first pass on again what the reader may not have had.",
            panel="Output and running",
            more="reliability.md#nothing-is-lost",
        ),
    ] = False
    topk: Annotated[int, Fixed()] = 5
    logits: Annotated[bool, Option("Write all logits.", panel="Output and running"), Fixed()] = False
    each: Annotated[bool, Fixed()] = False
    save_every: Annotated[
        int,
        Option(
            "Updates between saves of state and delta; after half a minute they are saved all the same.",
            min=1,
            panel="Output and running",
        ),
    ] = 20
    save_every_s: float = 30.0
    save_full: Annotated[bool, Option("Save a delta also where every weight changes.", panel="Output and running")] = (
        False
    )
    max_ms: Annotated[
        float | None,
        Option(
            "Mean time per frame in ms: updates are left out to keep it, never predictions.",
            above=0,
            panel="Output and running",
        ),
    ] = None
    realtime: Annotated[
        bool,
        Option(
            "Leave out updates, never predictions, while a video or live source runs ahead.",
            panel="Output and running",
        ),
    ] = False
    latency: Annotated[
        bool,
        Option("Hand out predictions before the update on their batch begins.", panel="Output and running"),
        Fixed(),
    ] = False
    flush_after: Annotated[
        float | None,
        Option(
            "Predict frames that have waited so long for their batch to be full; they are learned from with it.",
            metavar="SECONDS",
            min=0,
            default="never",
            panel="Output and running",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        Option(
            "Memory to keep within, such as 2G: so many images at a time as fit.",
            metavar="SIZE",
            read=read_size,
            panel="Output and running",
        ),
    ] = None
    on_error: Annotated[
        Literal["skip", "stop"],
        Option("At a frame that cannot be read.", panel="Output and running"),
    ] = "skip"
    seed: Annotated[
        int, Option("Seed of every random choice.", min=0, max=MOST_SEED, panel="Output and running"), Fixed()
    ] = 0

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
