"""Settings of the methods that are for zero-shot models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remtta.methods.settings.base import NO_WEIGHTS, BatchNorms, MethodConfig, setting
from remtta.methods.settings.rem import REMConfig

Order = Literal["parallel", "sequential"]
_UNUSED = ("answer", "anchor", "bn_momentum", "centre")
_WHOLE = "{}, whose steps have the whole batch"


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

    rounds: int = setting(5, ">= 1")
    order: Order = "sequential"
    steps: int = 2
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused: ClassVar[tuple[str, ...]] = _UNUSED
    whole_batch: ClassVar[str | None] = _WHOLE.format("WATT")


@dataclass(frozen=True)
class CLIPArTTConfig(MethodConfig):
    """Settings of CLIPArTT; by default the paper's, which starts from the source with every batch.

    Attributes:
        likeliest: Classes that an image's sentence names, K in the paper.
        steps: Optimizer steps per batch.

    The others are those of `MethodConfig`; `micro_batch` must stay None.

    Source: CLIPArTT, arXiv:2405.00754.
    """

    likeliest: int = setting(3, ">= 1")
    steps: int = 10
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused: ClassVar[tuple[str, ...]] = ("answer", "centre")
    whole_batch: ClassVar[str | None] = _WHOLE.format("CLIPArTT")


@dataclass(frozen=True)
class TPTConfig(MethodConfig):
    """Settings of TPT; by default the official code's, without its weight decay.

    With `micro_batch`, that many views go through the image tower at a time.

    Attributes:
        num_views: Views of each image: itself, and augmented ones.
        certain_share: Share of the views, those of the lowest entropy, that teach.
        augmix: Whether views are AugMix's, as the official code has them for
            fine-grained data sets, or crops and flips, as for ImageNet's.

    Source: Test-Time Prompt Tuning, arXiv:2209.07511.
    """

    num_views: int = setting(64, ">= 1")
    certain_share: float = setting(0.1, "in (0, 1]")
    augmix: bool = False
    lr: float = 5e-3
    bn: BatchNorms = "running"  # the views are of one image
    unused: ClassVar[tuple[str, ...]] = (*NO_WEIGHTS, "answer", "episodic", "centre")
    no_layers: ClassVar[str | None] = "as no weight changes"


@dataclass(frozen=True)
class REMWATTConfig(REMConfig):
    """Settings of REM in WATT's loop: both methods', on the norms that REM trains.

    Attributes:
        rounds: How often the weights are averaged over all templates.
        order: "sequential", each template goes on from the last one's weights,
            or "parallel", each from the round's start.
        steps: Optimizer steps per template and round.
    """

    rounds: int = setting(5, ">= 1")
    order: Order = "sequential"
    steps: int = 2
    episodic: bool = True
    unused: ClassVar[tuple[str, ...]] = (*_UNUSED, "margin", "consistency_weight", "confident_below")
    whole_batch: ClassVar[str | None] = _WHOLE.format("WATT")
