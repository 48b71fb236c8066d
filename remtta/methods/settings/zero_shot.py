"""Settings of the methods that are for zero-shot models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from remtta.errors import check, check_finite
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, MethodConfig
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
class CLIPArTTConfig(MethodConfig):
    """Settings of CLIPArTT; by default the paper's, which starts from the source with every batch.

    Attributes:
        likeliest: Classes that an image's sentence names, K in the paper.
        steps: Optimizer steps per batch.

    The others are those of `MethodConfig`; `micro_batch` must stay None.

    Source: CLIPArTT, arXiv:2405.00754.
    """

    likeliest: int = 3
    steps: int = 10
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused: ClassVar[tuple[str, ...]] = ("answer",)

    def __post_init__(self) -> None:
        check(self.likeliest >= 1, "likeliest", self.likeliest, ">= 1")
        _check_whole(self, "CLIPArTT")
        super().__post_init__()


@dataclass(frozen=True)
class BATCLIPConfig(MethodConfig):
    """Settings of BATCLIP; by default the official code's for CIFAR, without its weight decay.

    Those of `MethodConfig`; `micro_batch` must stay None. `adapt_layers` is of
    the image tower; all norms of the text tower adapt.

    Source: BATCLIP, arXiv:2412.02837.
    """

    adapt_layers: str | None = "all"

    def __post_init__(self) -> None:
        _check_whole(self, "BATCLIP")
        super().__post_init__()


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

    num_views: int = 64
    certain_share: float = 0.1
    augmix: bool = False
    lr: float = 5e-3
    bn: Literal["batch", "running"] = "running"  # the views are of one image
    unused: ClassVar[tuple[str, ...]] = ("adapt_layers", "anchor", "bn_momentum", "answer", "episodic")

    def __post_init__(self) -> None:
        check(self.num_views >= 1, "num-views", self.num_views, ">= 1")
        check(0 < self.certain_share <= 1, "certain-share", self.certain_share, "in (0, 1]")
        check(self.adapt_layers is None, "adapt-layers", self.adapt_layers, "left out, as no weight changes")
        super().__post_init__()


@dataclass(frozen=True)
class TDAConfig(MethodConfig):
    """Settings of TDA, which trains nothing; by default the official code's for ImageNet.

    Attributes:
        shots: Certain images that are kept per class, at most.
        alpha: Weight of what they say.
        beta: How fast that falls with the distance.
        negative_shots: Doubtful images that are kept per class, at most.
        negative_alpha: Weight of what those say.
        negative_beta: How fast that falls with the distance.
        negative_above: Images are doubtful whose entropy in nats is over this share of log2 C,
        negative_below: and under this.
        possible_above: Probability over which a doubtful image speaks against a class.

    Of the shared ones only episodic, micro_batch and precision are used.

    Source: Efficient Test-Time Adaptation of Vision-Language Models, arXiv:2403.18293.
    """

    shots: int = 3
    alpha: float = 2.0
    beta: float = 5.0
    negative_shots: int = 2
    negative_alpha: float = 0.117
    negative_beta: float = 1.0
    negative_above: float = 0.2
    negative_below: float = 0.5
    possible_above: float = 0.03
    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS)

    def __post_init__(self) -> None:
        for name in ("shots", "negative_shots", "alpha", "beta", "negative_alpha", "negative_beta"):
            check_finite(getattr(self, name), name.replace("_", "-"), ">= 0")
        for name in ("negative_above", "negative_below", "possible_above"):
            check(0 <= getattr(self, name) <= 1, name.replace("_", "-"), getattr(self, name), "in [0, 1]")
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
    unused: ClassVar[tuple[str, ...]] = (*_UNUSED, "margin", "consistency_weight", "confident_below")

    def __post_init__(self) -> None:
        _check(self)
        super().__post_init__()


def _check(config: WATTConfig | REMWATTConfig) -> None:
    check(config.rounds >= 1, "rounds", config.rounds, ">= 1")
    check(config.order in get_args(Order), "order", config.order, "parallel or sequential")
    _check_whole(config, "WATT")


def _check_whole(config: MethodConfig, method: str) -> None:
    rule = f"left out with {method}, whose steps have the whole batch"
    check(config.micro_batch is None, "micro-batch", config.micro_batch, rule)
