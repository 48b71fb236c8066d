"""Settings of the methods that train small networks beside the model, after a warm-up on source images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remtta.errors import check, check_finite
from remtta.methods.settings.base import MethodConfig, Optimizer


@dataclass(frozen=True)
class BesideConfig(MethodConfig):
    """What they share. No weight of the model changes.

    Attributes:
        entropy_margin: Images with less entropy are learned from, as a fraction of ln C.
        warmup_images: Clean source images to warm up on, at most.
        warmup_lr: Learning rate of the warm-up, which is Adam's here.
    """

    entropy_margin: float = 0.4
    warmup_images: int = 10_000
    warmup_lr: float = 1e-3
    unused: ClassVar[tuple[str, ...]] = ("adapt_layers", "anchor", "bn_momentum")

    def __post_init__(self) -> None:
        check_finite(self.entropy_margin, "entropy margin", "> 0")
        check(self.warmup_images >= 1, "warmup images", self.warmup_images, ">= 1")
        check_finite(self.warmup_lr, "warmup lr", "> 0")
        check(self.adapt_layers is None, "adapt-layers", self.adapt_layers, "left out, as no weight changes")
        check(not self.bn_momentum, "bn-momentum", self.bn_momentum, "left out, as no weight changes")
        super().__post_init__()


_WARM_UP = ("warmup_images", "warmup_lr", "bn", "bn_prior", "precision")


@dataclass(frozen=True)
class EcoTTAConfig(BesideConfig):
    """Settings of EcoTTA; optimizer and rate are EATA's for a ResNet-50, which the authors' sample code points to.

    Attributes:
        distance_weight: Weight of the distance of each part's output from the frozen model's.
        two_steps: Whether the distance and the entropy have a step each, as in
            a community's code, or one together.

    The others are those of `BesideConfig`; `micro_batch` must stay None.

    Source: EcoTTA (Song et al., CVPR 2023), arXiv:2303.01904.
    """

    distance_weight: float = 0.5
    two_steps: bool = False
    lr: float = 2.5e-4
    optimizer: Optimizer = "sgd"
    lr_batch: ClassVar[int | None] = 64
    source_settings: ClassVar[tuple[str, ...] | None] = _WARM_UP

    def __post_init__(self) -> None:
        check_finite(self.distance_weight, "distance weight", ">= 0")
        rule = "left out with EcoTTA, whose networks normalise by the whole batch"
        check(self.micro_batch is None, "micro-batch", self.micro_batch, rule)
        super().__post_init__()


@dataclass(frozen=True)
class BECoTTAConfig(BesideConfig):
    """Settings of BECoTTA; the learning rate is the official code's, the others are this project's.

    Attributes:
        experts: Low-rank experts behind each block.
        rank: Rank of an expert.
        chosen: Experts that an image goes through.
        synergy: Weight of the mutual information of domains and experts, in the warm-up.

    Source: BECoTTA (Lee et al., ICML 2024), arXiv:2402.08712.
    """

    experts: int = 6
    rank: int = 8
    chosen: int = 3
    synergy: float = 0.1
    lr: float = 6e-7
    source_settings: ClassVar[tuple[str, ...] | None] = (*_WARM_UP, "experts", "rank", "chosen", "synergy")

    def __post_init__(self) -> None:
        check(self.experts >= 1, "experts", self.experts, ">= 1")
        check(self.rank >= 1, "rank", self.rank, ">= 1")
        check(1 <= self.chosen <= self.experts, "chosen", self.chosen, f"in 1-{self.experts}, the number of experts")
        check_finite(self.synergy, "synergy", ">= 0")
        super().__post_init__()
