"""Options of a stream, of a run over it, and of its guard."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import InitVar, dataclass
from typing import Annotated, Literal

from remtta.errors import UsageError, check
from remtta.options.option import (
    Bounds,
    Fixed,
    check_options,
    documented,
    method_option,
    output_option,
    prediction_option,
    read_size,
    stream_option,
)

DEFAULT_BATCH_SIZE = 50
"""Images per update on ImageNet-C in the paper (implementation details, appendix)."""

RENAMED = {"memory": "class_history", "least": "min_frames", "renewed": "check_every"}
"""Options of the guard as 0.5.0 named them."""

_log = logging.getLogger(__name__)

Action = Literal["off", "warn", "rollback", "stop"]
Answer = Literal["adapted", "both"]
Smooth = Literal["off", "auto"]
Engine = Literal["processes", "ray"]
Sort = Literal["name", "mtime", "none"]
Buffer = Literal["latest", "all"]
MAX_SEED = 2**63 - 1
OPEN_TIMEOUT_S, READ_TIMEOUT_S = 15.0, 15.0


@documented
@dataclass(frozen=True)
class LiveOptions:
    """Options of a camera or a network stream.

    If a source is faster than the model, `buffer` "latest" drops the oldest frames, and "all" makes it wait; one that
    cannot wait loses frames in its driver or on the network, or disconnects and is opened again. `read_timeout_s` are
    seconds without a decodable frame; with `wait_at_start`, a source that is missing at first is no error.
    """

    reconnect_for: Annotated[
        float,
        stream_option(
            "Seconds to wait for a lost camera or network stream; 0 ends the run. If set, or with --resume, also wait "
            "for a source that is missing at the start.",
            metavar="SECONDS",
            min=0,
            below=math.inf,
            default="60",
            common=True,
            more="reliability.md#sources-that-fail",
        ),
    ] = 60.0
    buffer: Annotated[
        Buffer, stream_option("Which frames of a live source to use if it is faster than the model.", default="latest")
    ] = "latest"
    poll: Annotated[
        float | None,
        stream_option(
            "Seconds between requests of an http:// address that serves a still image; an unchanged one is used once.",
            metavar="SECONDS",
            above=0,
            below=math.inf,
            default="1 for .jpg, .png, ...; else a video is expected",
        ),
    ] = None
    open_timeout_s: float = OPEN_TIMEOUT_S
    read_timeout_s: float = READ_TIMEOUT_S
    wait_at_start: bool = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The frames of a source to read, and their order.

    `live` are the options of cameras and network streams; None for the defaults, which are valid for any source.
    """

    limit: Annotated[int | None, stream_option("Use at most N frames.", metavar="N", min=1, common=True)] = None
    frame_stride: Annotated[int, stream_option("Use every K-th frame.", metavar="K", min=1, common=True)] = 1
    sort: Annotated[
        Sort, stream_option("Order of the files in a folder or glob; name puts frame_2 before frame_10.")
    ] = "name"
    null: Annotated[bool, stream_option("Paths on standard input end in NUL, not newline.", flags=("--null", "-0"))] = (
        False
    )
    live: LiveOptions | None = None

    def __post_init__(self) -> None:
        check_options(self)


@documented
@dataclass(frozen=True)
class GuardOptions:
    """Options of the guard: the model that predicts, and the response to harmful adaptation.

    Attributes:
        window: Number of frames on which a decision is based.
        class_history: Number of frames from which a dominant class is detected.
        min_frames: Minimum number of frames in the window for a decision.
        check_every: Number of new frames between decisions.
        doubt: How far the adapted model may fall behind before it is in doubt, relative to the mutual information of
            the source model's predictions.
        alarm: How far it may fall behind before an alarm.
        patience: Number of frames in doubt after which the source weights are restored without an alarm.
        lr_factor: Factor for the learning rate at each alarm.
        forgive_after: Number of frames without an alarm after which one is forgiven.
        most_drift: Norm of the change relative to the norm of the weights that raises an alarm by itself.
    """

    action: Annotated[
        Action | None,
        prediction_option(
            "What to do if adaptation makes predictions worse: only warn, restore the source weights (rollback), or "
            "also end the run after the last retry (stop).",
            flags=("--guard",),
            default="by the method: rollback for remtta, else off",
            common=True,
            more="guard.md",
        ),
    ] = None
    answer: Annotated[
        Answer | None,
        prediction_option(
            "Which model's prediction to report: the adapted model's, or the ensemble's with the source model (both).",
            default="by the method: both for remtta and, with batch norms, fast, else adapted",
            common=True,
            more="guard.md#which-model-predicts",
        ),
    ] = None
    retries: Annotated[
        int,
        prediction_option(
            "Number of rollbacks; the alarm after the last one ends adaptation.", flags=("--guard-retries",), min=0
        ),
    ] = 8
    window: int = 100
    class_history: int = 1000
    min_frames: int = 32
    check_every: int = 10
    doubt: float = 0.04
    alarm: float = 0.3
    patience: int = 500
    lr_factor: float = 0.5
    forgive_after: int = 10_000
    most_drift: float = 0.5
    memory: InitVar[int | None] = None  # names of 0.5.0
    least: InitVar[int | None] = None
    renewed: InitVar[int | None] = None

    @property
    def acts(self) -> bool:
        """True if it acts on harm instead of only reporting it."""
        return self.action in ("rollback", "stop")

    def filled(self, action: Action = "rollback", answer: Answer = "adapted") -> GuardOptions:
        """Return a copy with the action and answer that were left open."""
        return dataclasses.replace(self, action=self.action or action, answer=self.answer or answer)

    def __post_init__(self, *earlier: int | None) -> None:
        for (old, new), value in zip(RENAMED.items(), earlier, strict=True):
            if value is not None:
                _log.warning("the guard's %s is now called %s", old, new)
                object.__setattr__(self, new, value)
        check_options(self)
        for name in ("class_history", "check_every", "patience", "forgive_after"):
            check(getattr(self, name) >= 1, f"guard {name}", getattr(self, name), ">= 1")
        enough = 2 <= self.min_frames <= self.window
        check(enough, "guard min_frames", self.min_frames, f"between 2 and the window ({self.window})")
        check(0 < self.doubt <= self.alarm, "guard doubt", self.doubt, "> 0 and at most its alarm")
        check(0 < self.most_drift < math.inf, "guard most_drift", self.most_drift, "> 0 and finite")
        check(0 < self.lr_factor <= 1, "guard lr_factor", self.lr_factor, "in (0, 1]")


_BY_METHOD = GuardOptions()


@documented
@dataclass(frozen=True)
class RunOptions:
    """Options of a run over a stream; the method has its own settings.

    `guard` is a `GuardOptions(action, answer)`; with None, the adapted model predicts and harm is never undone. Each
    prediction lists the `topk` likeliest classes.
    State and delta are saved after `save_every_s` seconds even without `save_every` updates.
    """

    batch_size: Annotated[
        int, method_option("Frames per update.", flags=("--batch-size", "-b"), min=1, common=True)
    ] = DEFAULT_BATCH_SIZE
    reset_every: Annotated[
        int | None,
        method_option("Restore the source weights after every N frames used for updates.", min=1, metavar="N"),
        Fixed(),
    ] = None
    adapt_for: Annotated[
        int | None,
        method_option("Adapt on the first N frames, in whole batches; then only predict.", min=1, metavar="N"),
        Fixed(),
    ] = None
    guard: Annotated[GuardOptions | None, Fixed()] = _BY_METHOD
    smooth: Annotated[
        Smooth,
        prediction_option(
            "auto: smooth predictions over time while consecutive frames are related, as in video.",
            common=True,
            more="estimates.md#smoothing-over-time",
        ),
        Fixed(),
    ] = "off"
    estimate: Annotated[
        float | None,
        prediction_option(
            "Estimate the accuracy over the last 500 frames, given the model's accuracy on clean images (0 to 1); "
            "unlabelled clean images in --source-data make it more accurate.",
            metavar="ACCURACY",
            common=True,
            more="estimates.md#estimated-accuracy",
        ),
        Fixed(),
    ] = None
    expire_below: Annotated[
        float | None,
        prediction_option("Warn and record an event when the estimate falls below this.", metavar="ACCURACY"),
    ] = None
    overwrite: Annotated[bool, output_option("Replace an earlier run in the folder.", common=True)] = False
    resume: Annotated[
        bool,
        output_option(
            "Continue the run in --output where it stopped; start a new one if there is none.",
            common=True,
            more="reliability.md",
        ),
    ] = False
    topk: Annotated[int, Bounds(min=1), Fixed()] = 5
    logits: Annotated[bool, output_option("Add all logits to each row."), Fixed()] = False
    save_every: Annotated[
        int, output_option("Save state and delta every N updates; they are also saved every 30 s.", metavar="N", min=1)
    ] = 20
    save_every_s: Annotated[float, Bounds(above=0, below=math.inf)] = 30.0
    save_full: Annotated[
        bool, output_option("Write a delta even if every weight changes; it is as large as the model.")
    ] = False
    max_ms: Annotated[
        float | None,
        output_option(
            "Target mean time per frame in ms; updates are skipped to meet it, predictions never.",
            above=0,
            below=math.inf,
        ),
    ] = None
    realtime: Annotated[
        bool, output_option("Skip updates, never predictions, to keep up with a video or live source.")
    ] = False
    latency: Annotated[bool, output_option("Output a batch's predictions before its update."), Fixed()] = False
    flush_after: Annotated[
        float | None,
        output_option(
            "Predict frames that have waited this long for a full batch; they enter an update later, in their batch.",
            metavar="SECONDS",
            min=0,
            below=math.inf,
            default="2 on cameras and network streams, else never",
        ),
    ] = None
    max_memory: Annotated[
        int | None,
        output_option(
            "Memory limit, such as 2G; sets the largest micro-batch that fits.", metavar="SIZE", read=read_size
        ),
    ] = None
    on_error: Annotated[Literal["skip", "stop"], output_option("What to do if a frame cannot be read.")] = "skip"
    seed: Annotated[int, output_option("Seed of every random choice.", min=0, max=MAX_SEED), Fixed()] = 0

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
