"""Settings of the methods that train every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from remtta.errors import check, check_finite
from remtta.methods.settings.base import MethodConfig, Optimizer

Border = Literal["red", "grey", "black"]


@dataclass(frozen=True)
class WholeModelConfig(MethodConfig):
    """Settings of methods that change every weight, so that there are no layers to choose."""

    unused: ClassVar[tuple[str, ...]] = ("adapt_layers", "anchor", "bn_momentum")

    def __post_init__(self) -> None:
        check(self.adapt_layers is None, "adapt-layers", self.adapt_layers, "left out, as every weight changes")
        check(not self.bn_momentum, "bn-momentum", self.bn_momentum, "left out with methods that change every weight")
        super().__post_init__()


@dataclass(frozen=True)
class CoTTAConfig(WholeModelConfig):
    """Settings of CoTTA; the official code's, but for the learning rate that later papers use for ViTs.

    Attributes:
        teacher_decay: Share of the teacher that stays at each update.
        num_augmentations: Augmented views that the teacher averages.
        augment_below: It does so where the source model's confidence, the
            mean over the batch, is less. None for the official code's: 0.92 for
            10 classes, 0.72 for 100, 0.1 for 1,000, and on a line in log C
            between them.
        restore: Probability of each weight to go back to the source.
        all_parameters: Whether all of them learn, or only those called weight
            or bias, as in the official code: not position embeddings, the class
            token and layer scales.

    Source: Continual Test-Time Domain Adaptation, arXiv:2203.13591.
    """

    teacher_decay: float = 0.999
    num_augmentations: int = 32
    augment_below: float | None = None
    restore: float = 0.001
    all_parameters: bool = True
    lr: float = 1e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True

    def __post_init__(self) -> None:
        check(0 <= self.teacher_decay < 1, "teacher-decay", self.teacher_decay, "in [0, 1)")
        check(self.num_augmentations >= 1, "num-augmentations", self.num_augmentations, ">= 1")
        below = self.augment_below
        check(below is None or 0 <= below <= 1, "augment-below", below, "in [0, 1]")
        check(0 <= self.restore < 1, "restore", self.restore, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class MEMOConfig(WholeModelConfig):
    """Settings of MEMO; the learning rate is the paper's for transformers, without its weight decay.

    With `micro_batch`, that many views go through the model at a time; each
    then takes two forward passes, since the mean over all views comes first.

    Attributes:
        num_augmentations: Augmented views of each image.
        border: What a view shows beyond the image's edges: "red", (128, 0, 0) of
            255, which Pillow makes of the official code's 128; "grey", 128 in
            every channel; "black", as AugMix by itself.
        keep_optimizer: Whether the optimizer runs on from image to image, as in
            the official code, rather than start afresh as the weights do.

    Source: MEMO, arXiv:2110.09506.
    """

    num_augmentations: int = 64
    border: Border = "red"
    keep_optimizer: bool = False
    bn: Literal["batch", "running"] = "running"  # the views are of one image
    lr: float = 1e-5
    unused: ClassVar[tuple[str, ...]] = (*WholeModelConfig.unused, "answer")

    def __post_init__(self) -> None:
        check(self.num_augmentations >= 1, "num-augmentations", self.num_augmentations, ">= 1")
        check(self.border in get_args(Border), "border", self.border, "red, grey or black")
        super().__post_init__()


@dataclass(frozen=True)
class ViDAConfig(WholeModelConfig):
    """Settings of ViDA; by default those of the official code for ViT-B on ImageNet-C, at a batch of 50.

    Attributes:
        low_rank: Rank of the adapters for what the domains share.
        high_rank: Rank of the adapters for what is each domain's own.
        adapter_lr: Learning rate of the adapters; lr is that of the weights.
        teacher_decay: Share of the teacher's weights that stays at each update.
        adapter_decay: The same for its adapters.
        num_augmentations: Augmented views that tell how unsure the teacher is.
        threshold: How unsure it must be for the high-rank adapters to count more.

    Source: ViDA, arXiv:2306.04344.
    """

    low_rank: int = 1
    high_rank: int = 128
    adapter_lr: float = 2e-7
    teacher_decay: float = 0.999
    adapter_decay: float = 0.8
    num_augmentations: int = 10
    threshold: float = 0.2
    lr: float = 5e-7
    optimizer: Optimizer = "sgd"
    nesterov: bool = True

    def __post_init__(self) -> None:
        check(self.low_rank >= 1, "low-rank", self.low_rank, ">= 1")
        check(self.high_rank >= 1, "high-rank", self.high_rank, ">= 1")
        check_finite(self.adapter_lr, "adapter-lr", "> 0")
        check(0 <= self.teacher_decay < 1, "teacher-decay", self.teacher_decay, "in [0, 1)")
        check(0 <= self.adapter_decay < 1, "adapter-decay", self.adapter_decay, "in [0, 1)")
        check(self.num_augmentations >= 2, "num-augmentations", self.num_augmentations, ">= 2")
        check_finite(self.threshold, "threshold", ">= 0")
        super().__post_init__()


@dataclass(frozen=True)
class ContinualMAEConfig(WholeModelConfig):
    """Settings of Continual-MAE; by default those of the official code for ViT-B, at a batch of 20.

    Attributes:
        mask_ratio: Share of the patches to mask, the most uncertain ones, in (0, 1).
        num_dropouts: Forward passes under dropout that tell how uncertain they are.
        dropout: Share of the embedded numbers that dropout removes.
        hog_weight: Weight of the reconstruction of gradient histograms.
        restore: Probability of each weight to go back to the source.

    Source: Continual-MAE, arXiv:2312.12480.
    """

    mask_ratio: float = 0.5
    num_dropouts: int = 10
    dropout: float = 0.1
    hog_weight: float = 0.5
    restore: float = 0.01
    lr: float = 1e-5

    def __post_init__(self) -> None:
        check(0 < self.mask_ratio < 1, "mask-ratio", self.mask_ratio, "in (0, 1)")
        check(self.num_dropouts >= 2, "num-dropouts", self.num_dropouts, ">= 2")
        check(0 < self.dropout < 1, "dropout", self.dropout, "in (0, 1)")
        check_finite(self.hog_weight, "hog-weight", ">= 0")
        check(0 <= self.restore < 1, "restore", self.restore, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class PETALConfig(CoTTAConfig):
    """Settings of PETAL: CoTTA's and these; by default those of the official code.

    The learning rate, too, is the official code's, for a ResNet-50.

    Attributes:
        restore: Share of the weights, those of least squared gradient, that go back to the source.
        posterior_weight: Weight of the distance to the source's posterior.
        swag_lr: Learning rate of the steps on clean images that tell the posterior.
        swag_every: After how many of these steps the weights count towards it.
            The official code takes 8 snapshots in two passes over clean images.
        start: Where student and teacher begin, restored weights go back to, and
            the confidence is the model's of: "source", or "mean", the
            posterior's, as in the official code.

    Source: A Probabilistic Framework for Lifelong Test-Time Adaptation, arXiv:2212.09713.
    """

    restore: float = 0.003
    posterior_weight: float = 1e-11
    swag_lr: float = 1e-4
    swag_every: int = 1
    start: Literal["source", "mean"] = "source"
    lr: float = 1e-2
    source_settings: ClassVar[tuple[str, ...] | None] = ("swag_lr", "swag_every", "precision")

    def __post_init__(self) -> None:
        check_finite(self.posterior_weight, "posterior-weight", ">= 0")
        check_finite(self.swag_lr, "swag-lr", "> 0")
        check(self.swag_every >= 1, "swag-every", self.swag_every, ">= 1")
        check(self.start in ("source", "mean"), "start", self.start, "source or mean")
        super().__post_init__()
