"""Settings of the methods that train small networks beside the model, after a warm-up on source images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from remtta.errors import check
from remtta.methods.settings.base import NO_WEIGHTS, MethodConfig, Optimizer, setting


@dataclass(frozen=True)
class BesideConfig(MethodConfig):
    """What they share. No weight of the model changes.

    Attributes:
        entropy_margin: Images with less entropy are learned from, as a fraction of ln C.
        warmup_images: Clean source images to warm up on, at most.
        warmup_lr: Learning rate of the warm-up, which is Adam's here.
    """

    entropy_margin: float = setting(0.4, "> 0 and finite")
    warmup_images: int = setting(10_000, ">= 1")
    warmup_lr: float = setting(1e-3, "> 0 and finite")
    unused: ClassVar[tuple[str, ...]] = NO_WEIGHTS
    no_layers: ClassVar[str | None] = "as no weight changes"


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

    distance_weight: float = setting(0.5, ">= 0 and finite")
    two_steps: bool = False
    lr: float = 2.5e-4
    optimizer: Optimizer = "sgd"
    lr_batch: ClassVar[int | None] = 64
    whole_batch: ClassVar[str | None] = "EcoTTA, whose networks normalise by the whole batch"
    source_settings: ClassVar[tuple[str, ...] | None] = _WARM_UP


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

    experts: int = setting(6, ">= 1")
    rank: int = setting(8, ">= 1")
    chosen: int = 3
    synergy: float = setting(0.1, ">= 0 and finite")
    lr: float = 6e-7
    source_settings: ClassVar[tuple[str, ...] | None] = (*_WARM_UP, "experts", "rank", "chosen", "synergy")

    def __post_init__(self) -> None:
        check(1 <= self.chosen <= self.experts, "chosen", self.chosen, f"in 1-{self.experts}, the number of experts")
        super().__post_init__()
