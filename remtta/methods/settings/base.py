"""Settings shared by all methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from remtta.errors import UsageError, check
from remtta.methods.settings.renamed import current_settings
from remtta.options import run_options
from remtta.options.option import Bounds, check_options, method_option, output_option

Optimizer = Literal["adam", "sgd"]
Precision = Literal["auto", "fp32", "bf16"]
PredictionStep = Literal["first", "last"]
BatchNorms = Literal["batch", "recent", "running"]
FixedBatchNorms = Literal["batch", "running"]
"""Of methods that adapt more or less than norms, so that running statistics must not move with them."""


Positive = Annotated[float, Bounds(above=0, below=math.inf)]
NonNegative = Annotated[float, Bounds(min=0, below=math.inf)]
Finite = Annotated[float, Bounds(above=-math.inf, below=math.inf)]
Share = Annotated[float, Bounds(min=0, max=1)]
BelowOne = Annotated[float, Bounds(min=0, below=1)]
PositiveShare = Annotated[float, Bounds(above=0, max=1)]
ProperShare = Annotated[float, Bounds(above=0, below=1)]
Count = Annotated[int, Bounds(min=1)]
MAX_STEPS = 10_000
Steps = Annotated[int, Bounds(min=1, max=MAX_STEPS)]


def _read_anchor(text: str) -> float | str:
    """Parse a number, or "auto", which `method_config` resolves."""
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise UsageError(f"--anchor takes a number or auto, got {text}") from None


class _OldNames(type):
    """Lets the settings be constructed with their old names, too."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return super().__call__(*args, **current_settings(settings))


@dataclass(frozen=True, kw_only=True)
class MethodConfig(metaclass=_OldNames):
    """Settings shared by all methods that use gradient descent on the norms.

    Attributes:
        lr: Learning rate.
        optimizer: "adam" or "sgd", both without weight decay.
        momentum: SGD's momentum or Adam's first beta (the second is 0.999).
        nesterov: Use Nesterov momentum with SGD.
        steps: Optimizer steps per batch.
        prediction_step: The step before which a batch is predicted if there are several: "first", or "last" as in the
            methods' official code.
        anchor: Fraction by which every adapted weight returns to its source value after each step: theta <- theta +
            anchor (theta_0 - theta). 0, as published, turns it off; "auto", on the command line, is 1 - exp(-10
            lr), for Adam. Specific to this project; ROID mixes in 1 % of the source weights.
        episodic: Restore the source weights before every batch.
        center: Subtract the common component of all logits, in the loss and in predictions
            (`remtta.pipeline.centering`). Specific to this project.
        micro_batch: Images per forward and backward pass; fewer save memory without changing the update. None for the
            method's choice: the whole batch, or for `rem` on a CPU the fastest number.
        adapt_every: Update on every N-th batch only. Specific to this project.
        adapt_layers: Blocks whose norms adapt: None for the first three quarters, "all" for every norm of the model,
            "auto" for all in a model with batch norms or one block and else as None, or block numbers such as "0-8" or
            "0,2,4-6".
        bn: Statistics that batch norms use while a model adapts: "batch" for the batch's own, as in Tent; "recent" for
            those of the stream's images so far, of which the newest count most, mixed with the source's, which count
            twice as much in the long run. They suit batches of any size, and become the model's running statistics and
            part of the delta. "running" for the source's.
        bn_prior: Number of images N for which the source's statistics count beside a batch of n: their weight is N /
            (n + N) (Schneider et al., arXiv:2006.16971). None fills small batches up to 16, so that for a batch of one
            the source's weight is 15 / 16; with "recent", None is 102, twice what the recent images count for in the
            long run. 0 for the images' statistics alone.
        precision: "fp32", or "bf16" for matrix products in bf16 and everything else in fp32. "auto" becomes one of them
            in a pipeline (`remtta.pipeline.precision`), and otherwise is "fp32".

    Raises:
        UsageError: If a value is out of range; the message names it.
    """

    lr: Annotated[
        Positive,
        method_option(
            "Learning rate.",
            default="rem 0.001, remtta 0.01, or less for fewer than 20 images per batch",
            common=True,
            more="methods.md",
        ),
    ] = 1e-3
    optimizer: Annotated[Optimizer, method_option("Optimizer, without weight decay.", default="rem adam")] = "adam"
    momentum: Annotated[BelowOne, method_option("SGD's momentum or Adam's first beta.", default="rem 0.9")] = 0.9
    nesterov: bool = False
    steps: Annotated[int, method_option("Optimizer steps per batch.", min=1, max=MAX_STEPS, default="rem 1")] = 1
    prediction_step: PredictionStep = "first"
    anchor: Annotated[
        BelowOne,
        method_option(
            "Fraction by which weights return to the source after each step, 0 to below 1; auto: 1 - exp(-10 lr), for "
            "Adam.",
            metavar="FRACTION|auto",
            read=_read_anchor,
            default="remtta auto, else 0",
        ),
    ] = 0.0
    episodic: bool = False
    center: bool = False
    micro_batch: Annotated[
        int | None,
        method_option(
            "Images per training pass; the result is the same, with less memory.", min=1, default="automatic"
        ),
    ] = None
    adapt_every: Annotated[
        int,
        method_option(
            "Update on every N-th batch only; the others take one or two forward passes.",
            metavar="N",
            min=1,
            default="1",
            more="performance.md#two-passes",
        ),
    ] = 1
    adapt_layers: Annotated[
        str | None,
        method_option(
            'Blocks whose norms adapt, such as 0-8, or "all"; "auto" is all with batch norms or a single block, else '
            "three quarters.",
            default="remtta all, rem the first three quarters",
        ),
    ] = None
    bn: BatchNorms = "batch"
    bn_prior: Annotated[int, Bounds(min=0)] | None = None
    precision: Annotated[
        Precision,
        output_option(
            "bf16 is less exact; auto takes it for remtta and fast on streams where it is faster, else fp32.",
            default="auto",
            common=True,
            more="performance.md",
        ),
    ] = "auto"

    lr_batch: ClassVar[int | None] = None
    """Batch size for which the default learning rate is meant, if it grows with the batch size."""

    unused: ClassVar[tuple[str, ...]] = ()
    """Shared settings that this method has no use for; they must keep their defaults."""

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the settings that the method uses."""
        return tuple(member.name for member in fields(cls) if member.name not in cls.unused)

    @classmethod
    def lr_at(cls, batch_size: int) -> float:
        """Return the default learning rate for this many images per update."""
        return cls.lr * batch_size / cls.lr_batch if cls.lr_batch else cls.lr

    def __post_init__(self) -> None:
        check_options(self)
        sgd = self.optimizer == "sgd" and self.momentum > 0
        check(not self.nesterov or sgd, "nesterov", self.nesterov, "used with sgd and momentum")
        early = not (self.center and self.predicts_last_step)
        check(early, "prediction_step", self.prediction_step, "first with center")
        for name in self.unused:
            is_default = getattr(self, name) == getattr(type(self), name)
            check(is_default, name, getattr(self, name), f"left out, as {type(self).__name__} has no use for it")

    @property
    def predicts_last_step(self) -> bool:
        """True if the prediction is the one before the last of several steps."""
        return self.prediction_step == "last" and self.steps > 1

    def used(self) -> dict[str, Any]:
        """Return the settings that the method uses, as JSON would give them back."""
        values = asdict(self)
        return {
            name: list(values[name]) if isinstance(values[name], tuple) else values[name]
            for name in self.setting_names()
        }


@dataclass(frozen=True)
class Preset:
    """The defaults of a method beside those of its config.

    Settings override those. The anchor may be "auto"; the learning rate is reduced in proportion below 20 images per
    batch; those specific to Adam are dropped with another optimizer.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    action: run_options.Action = "off"  # of its guard
    answer: run_options.Answer = "adapted"  # which model predicts


PUBLISHED = Preset()
"""The config's own defaults, without a guard."""

REMTTA = Preset(
    {"optimizer": "adam", "lr": 0.01, "anchor": "auto", "center": True, "bn": "recent", "adapt_layers": "auto"},
    "rollback",
    "both",
)
"""That of the default method, `remtta`; measured in docs/results.md."""

BATCH_NORM_SETTINGS = ("bn", "bn_prior")
"""Settings of the statistics used by batch norms."""

NO_NORMS = ("adapt_layers", "anchor")
"""Settings of methods that adapt norms."""

UPDATE_SETTINGS = ("lr", "optimizer", "momentum", "nesterov", "steps", "prediction_step", "adapt_every", *NO_NORMS)
"""Settings of methods that train weights."""


@dataclass(frozen=True)
class NoNormsConfig(MethodConfig):
    """Settings of methods that train every weight, or something beside the model: there are no norms to select."""

    bn: FixedBatchNorms = "batch"
    unused: ClassVar[tuple[str, ...]] = NO_NORMS
