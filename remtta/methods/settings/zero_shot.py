"""Settings of the methods that are for zero-shot models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from remtta.errors import check
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem import REMConfig

Order = Literal["parallel", "sequential"]
_UNUSED = ("answer", "anchor", "bn_momentum")


@dataclass(frozen=True)
class WATTConfig(MethodConfig):
    """Settings of WATT; by default those of the official code, which starts from the source with every batch.

    Attributes:
        rounds: How often the weights are averaged over all templates.
        order: "sequential", each template goes on from the last one's weights
            (WATT-S), or "parallel", each from the round's start (WATT-P).
        steps: Optimizer steps per template and round.

    The others are those of `MethodConfig`; `micro_batch` must stay None.

    Source: WATT, arXiv:2406.13875.
    """

    rounds: int = 5
    order: Order = "sequential"
    steps: int = 2
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused: ClassVar[tuple[str, ...]] = _UNUSED

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


@dataclass(frozen=True)
class REMWATTConfig(REMConfig):
    """Settings of REM in WATT's loop: both methods', on the norms that REM trains.

    Attributes:
        rounds: How often the weights are averaged over all templates.
        order: "sequential", each template goes on from the last one's weights,
            or "parallel", each from the round's start.
        steps: Optimizer steps per template and round.
    """

    rounds: int = 5
    order: Order = "sequential"
    steps: int = 2
    episodic: bool = True
    unused: ClassVar[tuple[str, ...]] = (*_UNUSED, "margin", "consistency_weight", "confident_below", "gap_weighting")

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


def _check(config: WATTConfig | REMWATTConfig) -> None:
    check(config.rounds >= 1, "rounds", config.rounds, ">= 1")
    check(config.order in get_args(Order), "order", config.order, "parallel or sequential")
    rule = "left out with WATT, whose steps have the whole batch"
    check(config.micro_batch is None, "micro-batch", config.micro_batch, rule)
