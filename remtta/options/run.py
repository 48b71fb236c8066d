"""How a stream or an evaluation is run. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from remtta.errors import UsageError, check, check_finite

DEFAULT_BATCH_SIZE = 50
"""Images per update on ImageNet-C in the paper (implementation details, appendix)."""

SCENARIOS = ("continual", "episodic", "gradual", "recurring", "irregular", "mixed", "label-shift", "time-constrained")
"""Orders in which an evaluation visits its domains."""


Action = Literal["off", "warn", "rollback", "stop"]
Answer = Literal["adapted", "both", "auto"]
Smooth = Literal["off", "auto"]
Adapt = Literal["always", "auto"]


@dataclass(frozen=True)
class GuardOptions:
    """Who answers, and what is done about an adaptation that does harm.

    Attributes:
        action: "rollback" to the source weights, "stop" for that and an end
            of the run when the retries are used up, "warn" to only tell, or
            "off".
        answer: "adapted"; "both", the mean of the adapted and the source
            model's probabilities; or "auto", a mean weighted by which of them
            has seen more in the last frames.
        retries: Alarms that are rolled back; the next one ends adaptation.
        window: Frames that are looked at together.
        memory: Frames by which a camera is known to look at one class only.
        least: Frames in the window before there is a verdict.
        renewed: New frames after which there is another.
        most: The largest share that "auto" gives the adapted model.
        doubt: How far the adapted model may be behind, as a share of what the
            source's predictions tell apart, before it is in doubt.
        width: How steeply its share of an answer falls around there.
        alarm: How far behind is an alarm.
        patience: Frames of doubt after which the source weights come back, which is no alarm.
        lr_factor: What an alarm multiplies the learning rate by.
        forgive_after: Frames without an alarm after which one is forgiven.
        most_drift: Norm of the change over the norm of the weights that is
            an alarm by itself.
        cost: Share of the method's own time that the guard may take where the
            source is not asked for every answer.
    """

    action: Action = "rollback"
    answer: Answer = "adapted"
    retries: int = 8
    window: int = 100
    memory: int = 1000
    least: int = 32
    renewed: int = 10
    most: float = 0.7
    doubt: float = 0.04
    width: float = 0.02
    alarm: float = 0.3
    patience: int = 500
    lr_factor: float = 0.5
    forgive_after: int = 10_000
    most_drift: float = 0.5
    cost: float = 0.07

    @property
    def acts(self) -> bool:
        """Whether it does more than tell."""
        return self.action in ("rollback", "stop")

    def __post_init__(self) -> None:
        check(self.action in get_args(Action), "guard", self.action, "off, warn, rollback or stop")
        check(self.answer in get_args(Answer), "answer", self.answer, "adapted, both or auto")
        check(self.retries >= 0, "guard retries", self.retries, ">= 0")
        for name in ("memory", "renewed", "patience", "forgive_after"):
            check(getattr(self, name) >= 1, f"the guard's {name.replace('_', ' ')}", getattr(self, name), ">= 1")
        check(
            2 <= self.least <= self.window, "the guard's least frames", self.least, f"in 2 to its {self.window} frames"
        )
        check(0 < self.doubt <= self.alarm, "the guard's doubt", self.doubt, "> 0 and at most its alarm")
        check(0 < self.most <= 1, "the guard's most", self.most, "in (0, 1]")
        check(0 < self.width < math.inf, "the guard's width", self.width, "> 0 and finite")
        check(0 < self.most_drift < math.inf, "the guard's most drift", self.most_drift, "> 0 and finite")
        check(0 < self.lr_factor <= 1, "the guard's lr factor", self.lr_factor, "in (0, 1]")
        check(0 < self.cost <= 1, "the guard's cost", self.cost, "in (0, 1]")


@dataclass(frozen=True)
class RunOptions:
    """How a stream is run; the method has its own settings.

    Attributes:
        batch_size: Frames per update; the last batch may be smaller.
        topk: Classes listed per prediction.
        logits: Write all logits as well.
        each: Write what the adapted and the source model said, where both were asked.
        save_every: Updates between two saves of state and delta.
        save_every_s: Seconds after which they are saved all the same.
        save_full: Save a delta also of a method that changes every weight,
            which is as large as the model.
        reset_every: Go back to the source weights before the first batch
            after this many frames, so after whole batches; None for never.
        on_error: "skip" or "stop" at a frame that cannot be read.
        require_frames: An empty list of paths is an error, and no run of no frames.
        overwrite: Replace an earlier run in the same folder.
        resume: Go on with the run in the folder, or begin it if there is none.
        replay: When going on, first pass on again what the reader of the predictions may not have had.
        seed: Seeds torch before the first frame.
        max_ms: Mean time per frame in ms; updates are left out to keep it.
        realtime: Leave out updates while a video's or live source's own time
            has run ahead.
        latency: Write predictions before the update on their batch begins.
        flush_after: Seconds after which frames that wait for their batch to be full are predicted all the same;
            they are learned from with the whole batch. None for never.
        max_memory: Most bytes the process, or the GPU, is to need: the
            micro-batch is chosen by it where the config leaves it open.
        guard: Who answers, and when harm is undone, by methods that train
            weights and in no episodic run; None for the adapted model, and never.
        adapt: "auto" leaves out updates that teach next to nothing: those on more of the same; "always" none.
        smooth: "auto" has answers go by the frames before, too, where frames come in order; "off" never.
        memory: Conditions of which it is kept what they taught, for when they come back; 0 for none.
        estimate: Accuracy of the model on clean images, from which that of the last frames is estimated; None for no
            estimate.
        expire_below: Estimated accuracy of the answers below which an event tells to train the model again.
        share: Of many streams on one model: how far each one's adapted weights go to the mean of all, at each save.
        preset: Name of the preset that the settings come from, for the records.
    """

    batch_size: int = DEFAULT_BATCH_SIZE
    topk: int = 5
    logits: bool = False
    each: bool = False
    save_every: int = 20
    save_every_s: float = 30.0
    save_full: bool = False
    reset_every: int | None = None
    on_error: Literal["skip", "stop"] = "skip"
    require_frames: bool = False
    overwrite: bool = False
    resume: bool = False
    replay: bool = False
    seed: int = 0
    max_ms: float | None = None
    realtime: bool = False
    latency: bool = False
    flush_after: float | None = None
    max_memory: int | None = None
    guard: GuardOptions | None = GuardOptions(answer="auto")
    adapt: Adapt = "always"
    smooth: Smooth = "off"
    memory: int = 0
    estimate: float | None = None
    expire_below: float | None = None
    share: float = 0.0
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.flush_after is not None:
            check_finite(self.flush_after, "seconds before a flush", ">= 0")
        check_finite(self.save_every_s, "seconds between saves", "> 0")
        for name in ("batch_size", "topk", "save_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be >= 1, got {getattr(self, name)}")
        check(0 <= self.seed < 2**63, "seed", self.seed, "from 0 to 2^63 - 1")
        check(0 <= self.share <= 1, "share", self.share, "from 0 to 1")
        check(self.adapt in get_args(Adapt), "adapt", self.adapt, "always or auto")
        check(self.smooth in get_args(Smooth), "smooth", self.smooth, "off or auto")
        check(self.memory == 0 or self.memory > 1, "memory", self.memory, "of 2 conditions or more, or 0 for none")
        if self.estimate is not None:
            check(0 < self.estimate < 1, "estimate", self.estimate, "an accuracy above 0 and below 1")
        if self.expire_below is not None:
            if self.estimate is None:
                raise UsageError("--expire-below goes by an estimate; add --estimate with the accuracy on clean images")
            check(
                0 < self.expire_below < self.estimate,
                "expire_below",
                self.expire_below,
                "above 0 and below the estimate",
            )
        if self.overwrite and self.resume:
            raise UsageError("--overwrite replaces a run and --resume goes on with it; choose one")
        if self.reset_every is not None and self.reset_every < 1:
            raise UsageError(f"reset_every must be >= 1, got {self.reset_every}")


@dataclass(frozen=True)
class EvalOptions:
    """How an evaluation is run; every method has its own settings.

    Attributes:
        scenario: "continual" (reset only at the start), "episodic" (reset at
            each domain), "gradual" (severities 1 to 5 and back in each
            corruption), "recurring" (all domains again and again),
            "irregular" (domains in pieces of random lengths, in random
            order), "mixed" (all domains shuffled together), "label-shift",
            or "time-constrained".
        batch_size: Images per update; batches do not reach across domains.
        seeds: One run per method and seed; a seed decides the order of images.
        order: "shuffled" by the seed within each domain, or "stored".
        unseen: Domains that are tested after the others, without learning.
        revisit: Test all domains again at the end, without learning.
        imbalance: Label shift: how much likelier the class of the moment is.
        dirichlet: Label shift: a Dirichlet concentration instead. Irregular:
            that of the pieces' lengths, by default 1.
        visits: Recurring: how often each domain comes; by default 20.
        cost_ratio: Time-constrained: time of an adapting batch over that of a
            plain forward pass; measured if None.
        reset_every: Go back to the source weights before the first batch
            after this many images that entered an update; None for never.
            Tests without learning see the weights as they are.
        on_error: "stop" or "skip" at an image that cannot be read.
        guard: What watches the methods named with +guard.
        save_every_s: Seconds between two saves of the progress.
        overwrite: Replace an earlier evaluation in the folder.
        resume: Go on with the one in the folder.
        protocol: Name of the protocol the settings come from, for the records.
        engine: Where the runs of methods and seeds are made: "serial", one after the other, here; "processes" of this
            machine, or "ray": the workers of a cluster.
        jobs: Processes at a time; None for one per core.
    """

    scenario: str = "continual"
    batch_size: int = DEFAULT_BATCH_SIZE
    seeds: tuple[int, ...] = (0,)
    order: Literal["shuffled", "stored"] = "shuffled"
    unseen: tuple[str, ...] = ()
    revisit: bool = False
    imbalance: float = math.inf
    dirichlet: float | None = None
    visits: int | None = None
    cost_ratio: float | None = None
    reset_every: int | None = None
    on_error: Literal["skip", "stop"] = "stop"
    guard: GuardOptions = GuardOptions()
    save_every_s: float = 30.0
    overwrite: bool = False
    resume: bool = False
    protocol: str | None = None
    engine: Literal["serial", "processes", "ray"] = "serial"
    jobs: int | None = None

    def __post_init__(self) -> None:
        check(self.scenario in SCENARIOS, "scenario", self.scenario, f"one of {', '.join(SCENARIOS)}")
        check(self.batch_size >= 1, "batch size", self.batch_size, ">= 1")
        check(self.reset_every is None or self.reset_every >= 1, "reset every", self.reset_every, ">= 1")
        check(bool(self.seeds) and len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "different numbers")
        check(0 <= min(self.seeds) <= max(self.seeds) < 2**63, "seed", self.seeds, "from 0 to 2^63 - 1")
        check(self.jobs is None or self.jobs >= 1, "jobs", self.jobs, ">= 1")
        check(self.order in ("shuffled", "stored"), "order", self.order, "shuffled or stored")
        check(self.imbalance >= 1, "imbalance ratio", self.imbalance, ">= 1")
        check(self.dirichlet is None or self.dirichlet > 0, "Dirichlet concentration", self.dirichlet, "> 0")
        check(self.cost_ratio is None or self.cost_ratio >= 1, "cost ratio", self.cost_ratio, ">= 1")
        shifting = self.scenario == "label-shift"
        check(shifting or math.isinf(self.imbalance), "imbalance", self.imbalance, "left out but in label-shift")
        in_bursts = shifting or self.scenario == "irregular"
        check(
            in_bursts or self.dirichlet is None, "dirichlet", self.dirichlet, "left out but in label-shift, irregular"
        )
        again = self.scenario == "recurring"
        check(self.visits is None or self.visits >= 1, "visits", self.visits, ">= 1")
        check(again or self.visits is None, "visits", self.visits, "left out but in recurring")
        hurried = self.scenario == "time-constrained"
        check(hurried or self.cost_ratio is None, "cost ratio", self.cost_ratio, "left out but in time-constrained")
