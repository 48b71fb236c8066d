"""Settings of the methods that train every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remtta.methods.settings.base import NO_WEIGHTS, BatchNorms, MethodConfig, Optimizer, setting

Border = Literal["red", "grey", "black"]


@dataclass(frozen=True)
class WholeModelConfig(MethodConfig):
    """Settings of methods that change every weight, so that there are no layers to choose."""

    unused: ClassVar[tuple[str, ...]] = NO_WEIGHTS
    no_layers: ClassVar[str | None] = "as every weight changes"


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

    teacher_decay: float = setting(0.999, "in [0, 1)")
    num_augmentations: int = setting(32, ">= 1")
    augment_below: float | None = setting(None, "in [0, 1]")
    restore: float = setting(0.001, "in [0, 1)")
    all_parameters: bool = True
    lr: float = 1e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True


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

    num_augmentations: int = setting(64, ">= 1")
    border: Border = "red"
    keep_optimizer: bool = False
    bn: BatchNorms = "running"  # the views are of one image
    lr: float = 1e-5
    unused: ClassVar[tuple[str, ...]] = (*WholeModelConfig.unused, "answer", "centre")


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

    low_rank: int = setting(1, ">= 1")
    high_rank: int = setting(128, ">= 1")
    adapter_lr: float = setting(2e-7, "> 0 and finite")
    teacher_decay: float = setting(0.999, "in [0, 1)")
    adapter_decay: float = setting(0.8, "in [0, 1)")
    num_augmentations: int = setting(10, ">= 2")
    threshold: float = setting(0.2, ">= 0 and finite")
    lr: float = 5e-7
    optimizer: Optimizer = "sgd"
    nesterov: bool = True


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

    mask_ratio: float = setting(0.5, "in (0, 1)")
    num_dropouts: int = setting(10, ">= 2")
    dropout: float = setting(0.1, "in (0, 1)")
    hog_weight: float = setting(0.5, ">= 0 and finite")
    restore: float = setting(0.01, "in [0, 1)")
    lr: float = 1e-5


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

    restore: float = setting(0.003, "in [0, 1)")
    posterior_weight: float = setting(1e-11, ">= 0 and finite")
    swag_lr: float = setting(1e-4, "> 0 and finite")
    swag_every: int = setting(1, ">= 1")
    start: Literal["source", "mean"] = "source"
    lr: float = 1e-2
    source_settings: ClassVar[tuple[str, ...] | None] = ("swag_lr", "swag_every", "precision")
