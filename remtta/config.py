"""The methods' settings and their defaults, the published ones. Imports no torch, so that `--help` is fast."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

from remtta.errors import UsageError

Optimizer = Literal["adam", "sgd"]
Precision = Literal["auto", "fp32", "bf16"]
Masking = Literal["attention", "random", "background", "features"]


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """Settings that all methods of gradient descent on the norms share.

    Attributes:
        lr: Learning rate.
        optimizer: "adam" or "sgd", both without weight decay.
        momentum: SGD's momentum or Adam's first beta (the second is 0.999).
        nesterov: Nesterov's momentum, for SGD.
        steps: Optimizer steps per batch.
        episodic: Go back to the source weights before every batch.
        micro_batch: Images per forward and backward pass. The update is the
            same, the memory less. None leaves it to the method: the whole
            batch, or for REM on a CPU as many as it is fast with.
        adapt_layers: Which blocks' norms adapt: None for the first three
            quarters, "all" for every norm of the model, or block numbers
            such as "0-8" or "0,2,4-6".
        precision: "fp32", or "bf16" for matrix products in bf16, with all
            but the products in fp32. "auto" is "fp32", the exact one.

    Raises:
        UsageError: If a value is out of range; the text names it.
    """

    lr: float = 1e-3
    optimizer: Optimizer = "adam"
    momentum: float = 0.9
    nesterov: bool = False
    steps: int = 1
    episodic: bool = False
    micro_batch: int | None = None
    adapt_layers: str | None = None
    precision: Precision = "auto"

    lr_batch: ClassVar[int | None] = None
    """Batch size that the default learning rate is meant for, where it grows with the batch."""

    unused: ClassVar[tuple[str, ...]] = ()
    """Shared settings that change nothing here."""

    source_settings: ClassVar[tuple[str, ...] | None] = None
    """Settings that `source_statistics` depends on, for methods that learn from source images; None for all."""

    @classmethod
    def lr_at(cls, batch_size: int) -> float:
        """The default learning rate with this many images per update."""
        return cls.lr * batch_size / cls.lr_batch if cls.lr_batch else cls.lr

    def __post_init__(self) -> None:
        check(math.isfinite(self.lr) and self.lr > 0, "learning rate", self.lr, "> 0")
        check(self.optimizer in ("adam", "sgd"), "optimizer", self.optimizer, "adam or sgd")
        check(0 <= self.momentum < 1, "momentum", self.momentum, "in [0, 1)")
        sgd = self.optimizer == "sgd" and self.momentum > 0
        check(not self.nesterov or sgd, "nesterov", self.nesterov, "used with sgd and momentum")
        check(self.steps >= 1, "steps", self.steps, ">= 1")
        check(self.micro_batch is None or self.micro_batch >= 1, "micro-batch", self.micro_batch, ">= 1")
        check(self.precision in ("auto", "fp32", "bf16"), "precision", self.precision, "auto, fp32 or bf16")


_UPDATE = ("lr", "optimizer", "momentum", "nesterov", "steps", "adapt_layers")
"""Settings of methods that train weights."""


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    unused: ClassVar[tuple[str, ...]] = (*_UPDATE, "episodic", "micro_batch")


@dataclass(frozen=True)
class REMConfig(MethodConfig):
    """Settings of Ranked Entropy Minimization; the defaults are the paper's for ImageNet-C.

    Attributes:
        mask_ratios: Fractions of patch tokens to leave out, one per view: 0
            first, ascending, each in [0, 1). The paper's M_N.
        ranking_weight: Weight of the entropy ranking loss, the paper's lambda (Eq. 5).
        margin: Entropy gap asked of neighbouring views (Eq. 4), as a fraction
            of log C so that one value suits any number of classes C.
        consistency_weight: Weight of the masked consistency loss, 1 in the
            paper (Eq. 5). 0 leaves it out, as ranking_weight 0 does the other
            ("Effect of Each Component"); not both.
        masking: Which patch tokens a masked view leaves out: "attention", those
            the class token attends to most (Eq. 2); "background", those it
            attends to least, or "random" ("Effect of Masking Strategy"); or
            "features", those of the largest L2 norm, which needs no softmax
            attention (REM-FA, "Experiments on Different Network
            Architectures"). A view leaves out what less masked ones do, and more.
        confident_below: Learn only from images whose unmasked prediction has
            less entropy, as a fraction of log C; the loss of the others is zero,
            and stays in the mean. None for every image. The paper's active
            sample criterion ("Comparison with Augmentation-based EM
            approaches"); it names no threshold, and EATA's is 0.4.
        gap_weighting: Weigh each batch's loss by its estimated domain gap, as
            `REM` says. This project's answer to what the paper leaves open
            ("Failure Case Analysis").

    The others are those of `MethodConfig`.

    Raises:
        UsageError: If a value is out of range; the text names it.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """

    mask_ratios: tuple[float, ...] = (0.0, 0.1, 0.2)
    ranking_weight: float = 1.0
    margin: float = 0.0
    consistency_weight: float = 1.0
    masking: Masking = "attention"
    confident_below: float | None = None
    gap_weighting: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_ratios", tuple(float(ratio) for ratio in self.mask_ratios))
        _check_mask_ratios(self.mask_ratios)
        check(math.isfinite(self.ranking_weight) and self.ranking_weight >= 0, "lambda", self.ranking_weight, ">= 0")
        check(math.isfinite(self.margin) and self.margin >= 0, "margin", self.margin, ">= 0")
        weight = self.consistency_weight
        check(math.isfinite(weight) and weight >= 0, "consistency weight", weight, ">= 0")
        check(weight > 0 or self.ranking_weight > 0, "consistency weight", weight, "> 0 where lambda is 0")
        check(self.masking in get_args(Masking), "masking", self.masking, f"one of {', '.join(get_args(Masking))}")
        threshold = self.confident_below
        check(threshold is None or 0 < threshold < math.inf, "confident below", threshold, "> 0 and finite")
        check(isinstance(self.gap_weighting, bool), "gap weighting", self.gap_weighting, "True or False")
        forgets = self.gap_weighting and self.episodic
        check(not forgets, "gap weighting", True, "left out where episodic, as it compares a batch with earlier ones")
        super().__post_init__()


@dataclass(frozen=True)
class REMN1Config(REMConfig):
    """REM with a single masked view: the paper's N = 1, for two thirds of the time."""

    mask_ratios: tuple[float, ...] = (0.0, 0.1)


@dataclass(frozen=True)
class TentConfig(MethodConfig):
    """Settings of Tent; the defaults are the official code's for ViTs, at a batch of 64."""

    lr: float = 1e-3
    optimizer: Optimizer = "sgd"
    adapt_layers: str | None = "all"
    lr_batch: ClassVar[int | None] = 64


@dataclass(frozen=True)
class PseudoLabelConfig(MethodConfig):
    """Settings of Pseudo-label.

    Attributes:
        threshold: Predictions with a higher probability count as labels.
    """

    threshold: float = 0.9
    lr: float = 1e-2
    optimizer: Optimizer = "sgd"
    adapt_layers: str | None = "all"

    def __post_init__(self) -> None:
        check(0 <= self.threshold < 1, "threshold", self.threshold, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class SupervisedConfig(MethodConfig):
    """Settings of supervised adaptation: REM's, so that only the loss differs."""


@dataclass(frozen=True)
class ETAConfig(TentConfig):
    """Settings of ETA; the defaults are the official code's for ViTs, at a batch of 64.

    Attributes:
        entropy_margin: Images with less entropy are learned from, as a
            fraction of ln C.
        max_cosine: Of those, the ones whose probabilities have a smaller cosine
            with the running mean. It is meant for 1,000 classes and scaled by
            sqrt(1000 / C), as is the cosine of a certain prediction with a
            uniform mean.
        probs_momentum: How much of the running mean of the probabilities stays at
            each update.

    The others are those of `MethodConfig`.

    Source: EATA (Niu et al., ICML 2022), arXiv:2204.02610.
    """

    entropy_margin: float = 0.4
    max_cosine: float = 0.05
    probs_momentum: float = 0.9

    def __post_init__(self) -> None:
        check(self.entropy_margin > 0, "entropy margin", self.entropy_margin, "> 0")
        check(self.max_cosine > 0, "max cosine", self.max_cosine, "> 0")
        check(0 <= self.probs_momentum < 1, "probs momentum", self.probs_momentum, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class EATAConfig(ETAConfig):
    """Settings of EATA: ETA's, and how much the weights that matter to the source domain are kept.

    Attributes:
        fisher_weight: Weight of the squared distance from the source weights.
        fisher_images: Clean source images that say how much a weight matters.

    The others are those of `ETAConfig`.

    Source: EATA (Niu et al., ICML 2022), arXiv:2204.02610.
    """

    fisher_weight: float = 2000.0
    fisher_images: int = 2000
    source_settings: ClassVar[tuple[str, ...] | None] = ("adapt_layers", "fisher_images", "precision")

    def __post_init__(self) -> None:
        check(self.fisher_weight >= 0, "fisher weight", self.fisher_weight, ">= 0")
        check(self.fisher_images >= 1, "fisher images", self.fisher_images, ">= 1")
        super().__post_init__()


@dataclass(frozen=True)
class RDumbConfig(ETAConfig):
    """Settings of RDumb: ETA's, and when everything is forgotten.

    Attributes:
        reset_every_steps: Steps between two returns to the source weights.

    The others are those of `ETAConfig`.

    Source: RDumb (Press et al., NeurIPS 2023), arXiv:2306.05401.
    """

    lr: float = 2.5e-4
    reset_every_steps: int = 1000

    def __post_init__(self) -> None:
        check(self.reset_every_steps >= 1, "reset every steps", self.reset_every_steps, ">= 1")
        super().__post_init__()


@dataclass(frozen=True)
class _SARLikeConfig(MethodConfig):
    """SGD as SAR's official code runs it for ViTs: 1e-3 at a batch of 64, doubled at a batch of 1."""

    optimizer: Optimizer = "sgd"
    lr_batch: ClassVar[int | None] = 64

    @classmethod
    def lr_at(cls, batch_size: int) -> float:
        """In proportion to the batch, but twice that for single images."""
        return (2 if batch_size == 1 else 1) * super().lr_at(batch_size)


@dataclass(frozen=True)
class SARConfig(_SARLikeConfig):
    """Settings of SAR; the defaults are the official code's for ViTs.

    Attributes:
        entropy_margin: Images with less entropy are learned from, as a
            fraction of ln C.
        rho: Length of the step up the loss from which the gradient is taken.
        reset_below: Running mean of the loss, in nats, under which the model
            counts as collapsed and goes back to the source weights.
        loss_momentum: How much of that running mean stays at each update.

    The others are those of `MethodConfig`.

    Source: SAR (Niu et al., ICLR 2023), arXiv:2302.12400.
    """

    entropy_margin: float = 0.4
    rho: float = 0.05
    reset_below: float = 0.2
    loss_momentum: float = 0.9

    def __post_init__(self) -> None:
        check(self.entropy_margin > 0, "entropy margin", self.entropy_margin, "> 0")
        check(math.isfinite(self.rho) and self.rho > 0, "rho", self.rho, "> 0")
        check(self.reset_below >= 0, "reset below", self.reset_below, ">= 0")
        check(0 <= self.loss_momentum < 1, "loss momentum", self.loss_momentum, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class DeYOConfig(_SARLikeConfig):
    """Settings of DeYO; the defaults are the official code's for ViTs.

    Attributes:
        entropy_margin: Images with less entropy are candidates, as a fraction
            of ln C.
        weight_margin: Entropy at which a candidate's weight by entropy is 1, as a
            fraction of ln C.
        plpd_margin: Candidates are learned from whose label loses more
            probability than this when the image's patches are shuffled.
        grid: Patches in a row and in a column of the shuffled image.

    The others are those of `MethodConfig`.

    Source: DeYO (Lee et al., ICLR 2024), arXiv:2403.07366.
    """

    entropy_margin: float = 0.5
    weight_margin: float = 0.4
    plpd_margin: float = 0.2
    grid: int = 4

    def __post_init__(self) -> None:
        check(self.entropy_margin > 0, "entropy margin", self.entropy_margin, "> 0")
        check(math.isfinite(self.weight_margin), "weight margin", self.weight_margin, "a finite number")
        check(-1 <= self.plpd_margin < 1, "plpd margin", self.plpd_margin, "in [-1, 1)")
        check(self.grid >= 2, "grid", self.grid, ">= 2")
        super().__post_init__()


@dataclass(frozen=True)
class ROIDConfig(MethodConfig):
    """Settings of ROID; the defaults are the official code's for ViTs, at a batch of 64.

    Attributes:
        clip: Probabilities count up to this in the soft likelihood ratio.
        temperature: Of the weights exp(diversity * certainty / temperature).
        probs_momentum: How much of the running mean of the probabilities stays at
            each update.
        source_momentum: How much of the adapted weights stays after each step;
            the rest is made up from the source weights.
        prior_on: What the batch's smoothed class prior multiplies, "probabilities"
            or, as in the official code, "logits".

    The others are those of `MethodConfig`; `micro_batch` must stay None.

    Source: ROID (Marsden et al., WACV 2024), arXiv:2306.00650.
    """

    clip: float = 0.99
    temperature: float = 1 / 3
    probs_momentum: float = 0.9
    source_momentum: float = 0.99
    prior_on: Literal["probabilities", "logits"] = "probabilities"
    lr: float = 2.5e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True
    adapt_layers: str | None = "all"
    lr_batch: ClassVar[int | None] = 64

    def __post_init__(self) -> None:
        check(0 < self.clip < 1, "clip", self.clip, "in (0, 1)")
        check(self.temperature > 0, "temperature", self.temperature, "> 0")
        for name in ("probs_momentum", "source_momentum"):
            check(0 <= getattr(self, name) <= 1, name.replace("_", " "), getattr(self, name), "in [0, 1]")
        check(self.prior_on in ("probabilities", "logits"), "prior on", self.prior_on, "probabilities or logits")
        rule = "left out with ROID and CMF, which weigh each image against the whole batch"
        check(self.micro_batch is None, "micro-batch", self.micro_batch, rule)
        super().__post_init__()


@dataclass(frozen=True)
class CMFConfig(ROIDConfig):
    """Settings of CMF: ROID's, and those of the hidden weights that the adapted ones are an observation of.

    Attributes:
        source_momentum: How much of the hidden weights stays at each step; the
            rest is made up from the source weights.
        hidden_momentum: How much of the adapted weights stays after each step;
            the rest is made up from the hidden weights.
        process_noise: Growth of the hidden weights' variance per step, for the
            38,400 norm parameters of a ViT-B/16; scaled by their number.
        least_kept: The least share of the hidden weights that an observation
            leaves.

    The others are those of `ROIDConfig`.

    Source: CMF (Lee and Chang, ICLR 2024), openreview.net/forum?id=BllUWdpIOA.
    """

    hidden_momentum: float = 0.99
    process_noise: float = 0.005
    least_kept: float = 0.89

    def __post_init__(self) -> None:
        check(0 <= self.hidden_momentum <= 1, "hidden momentum", self.hidden_momentum, "in [0, 1]")
        check(0 < self.process_noise < 1, "process noise", self.process_noise, "in (0, 1)")
        check(0 <= self.least_kept <= 1, "least kept", self.least_kept, "in [0, 1]")
        super().__post_init__()


@dataclass(frozen=True)
class WholeModelConfig(MethodConfig):
    """Settings of methods that change every weight, so that there are no layers to choose."""

    def __post_init__(self) -> None:
        check(self.adapt_layers is None, "adapt-layers", self.adapt_layers, "left out, as every weight changes")
        super().__post_init__()


@dataclass(frozen=True)
class CoTTAConfig(WholeModelConfig):
    """Settings of CoTTA; the official code's, but for the learning rate that later papers use for ViTs.

    Attributes:
        teacher_decay: Share of the teacher that stays at each update.
        num_augmentations: Augmented views that the teacher averages.
        augment_below: It does so where the source model's confidence, the
            mean over the batch, is less. 0.1 is the official code's for
            ImageNet; it has 0.92 for CIFAR-10 and 0.72 for CIFAR-100.
        restore: Probability of each weight to go back to the source.

    Source: Continual Test-Time Domain Adaptation, arXiv:2203.13591.
    """

    teacher_decay: float = 0.999
    num_augmentations: int = 32
    augment_below: float = 0.1
    restore: float = 0.001
    lr: float = 1e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True

    def __post_init__(self) -> None:
        check(0 <= self.teacher_decay < 1, "teacher-decay", self.teacher_decay, "in [0, 1)")
        check(self.num_augmentations >= 1, "num-augmentations", self.num_augmentations, ">= 1")
        check(0 <= self.augment_below <= 1, "augment-below", self.augment_below, "in [0, 1]")
        check(0 <= self.restore < 1, "restore", self.restore, "in [0, 1)")
        super().__post_init__()


@dataclass(frozen=True)
class LAMEConfig(MethodConfig):
    """Settings of LAME, which takes no step: of the shared ones only micro_batch and precision are used.

    Attributes:
        neighbours: Nearest neighbours in the batch that a prediction is pulled to.

    Source: Parameter-free Online Test-time Adaptation, arXiv:2201.05718.
    """

    neighbours: int = 5
    unused: ClassVar[tuple[str, ...]] = (*_UPDATE, "episodic")

    def __post_init__(self) -> None:
        check(self.neighbours >= 1, "neighbours", self.neighbours, ">= 1")
        super().__post_init__()


@dataclass(frozen=True)
class MEMOConfig(WholeModelConfig):
    """Settings of MEMO; the learning rate is the paper's for transformers, without its weight decay.

    With `micro_batch`, that many views go through the model at a time; each
    then takes two forward passes, since the mean over all views comes first.

    Attributes:
        num_augmentations: Augmented views of each image.

    Source: MEMO, arXiv:2110.09506.
    """

    num_augmentations: int = 64
    lr: float = 1e-5

    def __post_init__(self) -> None:
        check(self.num_augmentations >= 1, "num-augmentations", self.num_augmentations, ">= 1")
        super().__post_init__()


@dataclass(frozen=True)
class FOAConfig(MethodConfig):
    """Settings of FOA, which has no gradients: of the shared ones only episodic, micro_batch and precision are used.

    Attributes:
        num_prompts: Prompt tokens.
        population: Candidates per batch; 4 + floor(3 ln of the prompts'
            numbers) if None, which is the paper's 27 (and one) on ViT-B.
        distance_weight: Weight of the distance to the source's features at a
            batch of 64; in proportion to others, as the entropy is a sum.
        shift_decay: Share of the running mean feature that stays at each batch.

    Source: Test-Time Model Adaptation with Only Forward Passes, arXiv:2404.01650.
    """

    num_prompts: int = 3
    population: int | None = None
    distance_weight: float = 0.4
    shift_decay: float = 0.9
    unused: ClassVar[tuple[str, ...]] = _UPDATE

    def __post_init__(self) -> None:
        check(self.num_prompts >= 1, "num-prompts", self.num_prompts, ">= 1")
        check(self.population is None or self.population >= 4, "population", self.population, ">= 4")
        weight = self.distance_weight
        check(math.isfinite(weight) and weight >= 0, "distance-weight", weight, ">= 0")
        check(0 <= self.shift_decay < 1, "shift-decay", self.shift_decay, "in [0, 1)")
        check(self.steps == 1, "steps", self.steps, "1, a generation per batch")
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
        check(math.isfinite(self.adapter_lr) and self.adapter_lr > 0, "adapter-lr", self.adapter_lr, "> 0")
        check(0 <= self.teacher_decay < 1, "teacher-decay", self.teacher_decay, "in [0, 1)")
        check(0 <= self.adapter_decay < 1, "adapter-decay", self.adapter_decay, "in [0, 1)")
        check(self.num_augmentations >= 2, "num-augmentations", self.num_augmentations, ">= 2")
        check(math.isfinite(self.threshold) and self.threshold >= 0, "threshold", self.threshold, ">= 0")
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
        check(math.isfinite(self.hog_weight) and self.hog_weight >= 0, "hog-weight", self.hog_weight, ">= 0")
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

    Source: A Probabilistic Framework for Lifelong Test-Time Adaptation, arXiv:2212.09713.
    """

    restore: float = 0.003
    posterior_weight: float = 1e-11
    swag_lr: float = 1e-4
    lr: float = 1e-2

    def __post_init__(self) -> None:
        weight = self.posterior_weight
        check(math.isfinite(weight) and weight >= 0, "posterior-weight", weight, ">= 0")
        check(math.isfinite(self.swag_lr) and self.swag_lr > 0, "swag-lr", self.swag_lr, "> 0")
        super().__post_init__()


@dataclass(frozen=True)
class VDPConfig(MethodConfig):
    """Settings of VDP. No official code could be read: the values are this project's, the teacher's CoTTA's.

    Attributes:
        prompt_share: Height and width of a prompt, as a share of the image's.
        teacher_decay: Share of the teacher's prompts that stays at each update.
        homeostasis: How strongly sensitive numbers of the domain-agnostic prompt are held back.

    Source: Decorate the Newcomers, arXiv:2212.04145.
    """

    prompt_share: float = 0.25
    teacher_decay: float = 0.999
    homeostasis: float = 1.0

    def __post_init__(self) -> None:
        check(self.adapt_layers is None, "adapt-layers", self.adapt_layers, "left out, as no weight changes")
        check(0 < self.prompt_share <= 1, "prompt-share", self.prompt_share, "in (0, 1]")
        check(0 <= self.teacher_decay < 1, "teacher-decay", self.teacher_decay, "in [0, 1)")
        check(math.isfinite(self.homeostasis) and self.homeostasis >= 0, "homeostasis", self.homeostasis, ">= 0")
        super().__post_init__()


METHOD_CONFIGS: dict[str, type[MethodConfig]] = {
    "source": SourceConfig,
    "pseudo-label": PseudoLabelConfig,
    "tent": TentConfig,
    "tent-come": TentConfig,
    "eta": ETAConfig,
    "eata": EATAConfig,
    "eata-come": EATAConfig,
    "rdumb": RDumbConfig,
    "sar": SARConfig,
    "sar-come": SARConfig,
    "deyo": DeYOConfig,
    "roid": ROIDConfig,
    "cmf": CMFConfig,
    "rem": REMConfig,
    "rem-n1": REMN1Config,
    "rem-come": REMConfig,
    "supervised": SupervisedConfig,
    "cotta": CoTTAConfig,
    "lame": LAMEConfig,
    "memo": MEMOConfig,
    "foa": FOAConfig,
    "vida": ViDAConfig,
    "continual-mae": ContinualMAEConfig,
    "petal": PETALConfig,
    "vdp": VDPConfig,
}
"""The settings of every method, by its name on the command line."""


METHOD_SUMMARIES: dict[str, str] = {
    "source": "no adaptation, the baseline",
    "pseudo-label": "train on its own confident predictions (Lee, 2013)",
    "tent": "lower the entropy of predictions (Wang et al., ICLR 2021)",
    "tent-come": "Tent on an entropy that knows doubt (COME, Zhang et al., ICLR 2025)",
    "eta": "entropy of certain, varied images (Niu et al., ICML 2022)",
    "eata": "ETA that keeps what matters on source images (Niu et al., ICML 2022)",
    "eata-come": "EATA on COME's entropy",
    "rdumb": "ETA that starts again now and then (Press et al., NeurIPS 2023)",
    "sar": "entropy of certain images, towards flat minima (Niu et al., ICLR 2023)",
    "sar-come": "SAR on COME's entropy",
    "deyo": "entropy of certain images known by shape (Lee et al., ICLR 2024)",
    "roid": "weighted likelihood ratio, source mixed in (Marsden et al., WACV 2024)",
    "cmf": "ROID with Kalman-filtered weights (Lee and Chang, ICLR 2024)",
    "rem": "masked views agree and rank by entropy (Han et al., ICML 2025)",
    "rem-n1": "REM with one masked view, for two thirds of the time",
    "rem-come": "REM ranking by COME's entropy",
    "supervised": "train on the true labels: an upper bound, for remtta eval",
    "cotta": "learn from an averaged teacher, restore at random (Wang et al., CVPR 2022)",
    "lame": "correct predictions by their neighbours, no training (Boudiaf et al., CVPR 2022)",
    "memo": "adapt to each image's augmented views, then forget it (Zhang et al., NeurIPS 2022)",
    "foa": "search prompts by forward passes only, needs clean images (Niu et al., ICML 2024)",
    "vida": "low- and high-rank adapters learn from an averaged teacher (Liu et al., ICLR 2024)",
    "continual-mae": "mask uncertain patches, agree and reconstruct (Liu et al., CVPR 2024)",
    "petal": "CoTTA near the source's posterior, needs clean images (Brahma and Rai, CVPR 2023)",
    "vdp": "pixel prompts learn from an averaged teacher (Gan et al., AAAI 2023)",
}
"""A line about every method, by its name on the command line."""


GUARDED = "+guard"
"""Ending of a method's name in an evaluation that asks for it under the guard."""


def unguarded(name: str) -> str:
    """The method's own name: `rem` for `rem+guard`."""
    return name.removesuffix(GUARDED)


def method_config(name: str, settings: Mapping[str, Any], *, batch_size: int) -> MethodConfig:
    """A method's config: its published defaults with these settings in place of some.

    Args:
        name: A method's name on the command line.
        settings: Values by field name.
        batch_size: Images per update; some methods' learning rates grow with it.

    Raises:
        UsageError: If there is no such method, it has no such setting, or a value is out of range.
    """
    if name not in METHOD_CONFIGS:
        raise UsageError(f'unknown method "{name}"; choose {", ".join(METHOD_CONFIGS)}')
    kind = METHOD_CONFIGS[name]
    known = [field.name for field in dataclasses.fields(kind)]
    for setting in settings:
        check(setting in known, f"a setting of {name}", setting, f"one of {', '.join(known)}")
    if settings.get("optimizer") == "adam" or settings.get("momentum") == 0:
        settings = {"nesterov": False, **settings}  # which a method's default may ask of SGD
    if "lr" not in settings:
        settings = {**settings, "lr": kind.lr_at(batch_size)}
    for field in dataclasses.fields(kind):
        number = isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
        value = settings.get(field.name, field.default)
        check(not (number and isinstance(value, str)), f"{name}'s {field.name}", value, "a number")
    try:
        return kind(**settings)
    except UsageError:
        raise
    except (TypeError, ValueError, OverflowError) as error:  # such as text where a number belongs
        raise UsageError(f"a setting of {name} has a value of the wrong kind: {error}") from error


def check(holds: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks its rule.

    Raises:
        UsageError: Naming all three.
    """
    if not holds:
        raise UsageError(f"{name} must be {rule}, got {value}")


def _check_mask_ratios(ratios: tuple[float, ...]) -> None:
    shown = ",".join(f"{ratio:g}" for ratio in ratios)
    if len(ratios) < 2 or ratios[0] != 0.0:
        raise UsageError(f"mask ratios must start with 0 and name at least one masked view, got {shown or 'none'}")
    if not all(less < more for less, more in pairwise(ratios)) or not ratios[-1] < 1:
        raise UsageError(f"mask ratios must ascend within [0, 1), got {shown}")
