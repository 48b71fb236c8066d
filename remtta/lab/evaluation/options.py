"""Options of an evaluation: its labelled images, their order, and how methods are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from remtta.errors import UsageError, check, unknown
from remtta.options.option import (
    Fixed,
    Subset,
    check_options,
    data_option,
    method_option,
    output_option,
    protocol_option,
)
from remtta.options.run_options import DEFAULT_BATCH_SIZE, MAX_SEED, GuardOptions

SCENARIOS = ("continual", "episodic", "gradual", "recurring", "mixed", "walk", "label-shift", "time-constrained")
"""Orders in which an evaluation visits its domains."""

SampledOrder = Literal["one-class", "two-classes", "three-classes", "other-classes", "switch", "long-tail"]
"""Orders with only some of the images, which the seed decides."""
Order = Literal["shuffled", "stored", "runs-5", "runs-25", "runs-100", SampledOrder]

Resize = Literal["auto", "always", "never"]
ClassOrder = Literal["name", "number"]
ProtocolName = Literal["rem-paper", "rem-paper-cifar"]

_ALL_SEVERITIES = (1, 2, 3, 4, 5)
_SCENARIO_OPTIONS = {
    "imbalance": "label-shift",
    "dirichlet": "label-shift",
    "visits": "recurring",
    "cost_ratio": "time-constrained",
}
"""Options that apply to a single scenario."""

_GUARD = GuardOptions(action="rollback", answer="adapted")
_PROTOCOL_BATCH = {"rem-paper-cifar": 20}


@dataclass(frozen=True)
class DataOptions:
    """The labelled images of an evaluation, and their preprocessing."""

    domains: Annotated[
        tuple[str, ...] | None,
        data_option("Domains to evaluate, in this order.", metavar="A,B", default="the standard order", common=True),
    ] = None
    severities: Annotated[
        tuple[int, ...] | None,
        data_option(
            "Severities to evaluate, 1 to 5, separated by commas.",
            flags=("--severity",),
            min=1,
            max=5,
            default="5, or the only one in ROOT; gradual: all",
            common=True,
        ),
    ] = None
    image_list: Annotated[
        Path | None,
        data_option("Evaluate only the images in this file, in its order; one wnid/name per line.", metavar="FILE"),
    ] = None
    labels_file: Annotated[
        Path | None,
        data_option(
            "Evaluate the images in this list as one domain; a CSV or TSV of paths and classes.",
            metavar="FILE",
            common=True,
            more="evaluation.md#a-few-labelled-frames-of-a-stream",
        ),
    ] = None
    class_map: Annotated[
        Path | None,
        data_option(
            "File with a folder name and class number per line, a folder per line in the order of classes, or JSON.",
            metavar="FILE",
            default="detected",
        ),
    ] = None
    class_order: Annotated[
        ClassOrder | None,
        data_option(
            "Order that numbers class folders: by name, as torchvision's ImageFolder (10 before 2), or by number.",
            default="number if all are numbers, else name",
        ),
    ] = None
    limit: Annotated[int | None, data_option("At most N images per domain.", metavar="N", min=1, common=True)] = None
    resize: Annotated[
        Resize,
        data_option(
            "Resize and crop images; auto: unless they already have the input size, and always with --protocol."
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_options(self)

    def severities_for(self, scenario: str) -> Sequence[int] | None:
        """Return the severities that a scenario visits, None for the default; raise UsageError if it has its own."""
        if scenario == "gradual" and self.severities is not None:
            raise UsageError("the gradual scenario visits all severities; leave --severity out")
        return _ALL_SEVERITIES if scenario == "gradual" else self.severities


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation; every method also has its own settings.

    Scenarios: "continual" (reset only at the start), "episodic" (reset at each domain), "gradual" (severities 1 to 5
    and back in each corruption), "recurring" (all domains repeatedly), "mixed" (all domains shuffled together),
    "walk" (conditions change every 50 images, severities rise and fall), "label-shift", or "time-constrained". Except
    in "mixed" and "walk", batches never span domains; tests without updates use the weights as they are, whatever
    `reset_every`. `guard` applies to methods named with +guard. Progress is saved every
    `save_every_s` seconds.
    """

    scenario: Annotated[
        str,
        protocol_option(
            f"Order of domains and resets: {', '.join(SCENARIOS)}.",
            complete=dict.fromkeys(SCENARIOS, ""),
            default="continual",
            common=True,
        ),
        Fixed(),
    ] = "continual"
    batch_size: Annotated[
        int,
        method_option(
            "Images per update.",
            flags=("--batch-size", "-b"),
            min=1,
            default=f"{DEFAULT_BATCH_SIZE}; by --protocol rem-paper-cifar 20",
            common=True,
        ),
        Fixed(),
    ] = 0
    seeds: Annotated[
        tuple[int, ...],
        protocol_option("Seeds, one run each, such as 0,1,2.", flags=("--seeds", "--seed"), common=True),
        Fixed(),
    ] = (0,)
    order: Annotated[
        Order | None,
        protocol_option(
            "Order of the images within a domain.",
            default="stored for arrays and image lists, else shuffled",
            common=True,
            more="evaluation.md#orders",
        ),
        Fixed(),
    ] = None
    unseen: Annotated[
        tuple[str, ...],
        protocol_option("Domains to test at the end, without updates.", metavar="A,B", default="none"),
        Fixed(),
    ] = ()
    revisit: Annotated[bool, protocol_option("Test all domains again at the end, without updates."), Fixed()] = False
    imbalance: Annotated[float, protocol_option("Label shift: imbalance ratio, 1 to inf.", min=1), Fixed()] = math.inf
    dirichlet: Annotated[
        float | None,
        protocol_option("Label shift: Dirichlet concentration of classes over time.", above=0, below=math.inf),
        Fixed(),
    ] = None
    visits: Annotated[
        int | None, protocol_option("Recurring: number of visits to each domain.", min=1, default="20"), Fixed()
    ] = None
    cost_ratio: Annotated[
        float | None,
        protocol_option(
            "Time-constrained: time of an update in forward passes.", min=1, below=math.inf, default="measured"
        ),
        Fixed(),
    ] = None
    reset_every: Annotated[
        int | None,
        method_option("Restore the source weights after every N images used for updates.", min=1, metavar="N"),
        Fixed(),
    ] = None
    on_error: Annotated[Literal["skip", "stop"], output_option("What to do if an image cannot be read.")] = "stop"
    guard: Annotated[GuardOptions, Subset(), Fixed()] = _GUARD
    save_every_s: float = 30.0
    overwrite: Annotated[bool, output_option("Replace an earlier evaluation.", common=True)] = False
    resume: Annotated[
        bool,
        output_option(
            "Continue the evaluation in --output, or start a new one; methods and seeds may be added.", common=True
        ),
    ] = False
    protocol: Annotated[
        ProtocolName | None,
        protocol_option("Settings of a paper: input size, normalisation, batch size.", common=True),
        Fixed(),
    ] = None
    columns: Annotated[
        tuple[str, ...] | None,
        output_option(
            "Columns of the tables: domains or some, mean, se, gain, top5, ece, first, unseen, revisit, speed.",
            metavar="A,B",
            default="all",
            more="evaluation.md#results",
        ),
    ] = None
    engine: Annotated[
        Literal["serial", "processes", "ray"],
        output_option(
            "Run methods and seeds one after the other, in local processes, or on Ray workers.",
            more="scale.md#tables-and-corruptions-on-many-cores",
        ),
    ] = "serial"
    jobs: Annotated[
        int | None,
        output_option("Number of processes.", flags=("--jobs", "-j"), min=1, default="one per core, or per GPU"),
    ] = None

    def __post_init__(self) -> None:
        if self.batch_size == 0:
            size = _PROTOCOL_BATCH.get(self.protocol or "", DEFAULT_BATCH_SIZE)
            object.__setattr__(self, "batch_size", size)
        if self.scenario not in SCENARIOS:
            raise unknown("scenario", self.scenario, SCENARIOS)
        check_options(self)
        check(bool(self.seeds) and len(set(self.seeds)) == len(self.seeds), "seeds", self.seeds, "different numbers")
        check(0 <= min(self.seeds) <= max(self.seeds) <= MAX_SEED, "seed", self.seeds, "from 0 to 2^63 - 1")
        for name, scenario in _SCENARIO_OPTIONS.items():
            if self.scenario != scenario and getattr(self, name) not in (None, math.inf):
                option = name.replace("_", "-")
                raise UsageError(f"--{option} belongs to --scenario {scenario}; the scenario is {self.scenario}")
        if self.overwrite and self.resume:
            raise UsageError("--overwrite replaces an evaluation and --resume continues it; choose one")
        if self.dirichlet is not None and not math.isinf(self.imbalance):
            raise UsageError("--dirichlet and --imbalance are two kinds of label shift; leave one out")
        if self.order not in (None, "shuffled") and self.shuffles:
            raise UsageError(f"--scenario {self.scenario} draws its own order of the images; leave --order out")

    @property
    def shuffles(self) -> bool:
        """True if the scenario's own order replaces that of the images."""
        return self.scenario in ("mixed", "walk", "label-shift")

    @property
    def samples(self) -> bool:
        """True if the order has only some of the images, which the seed decides."""
        return self.order in get_args(SampledOrder)
