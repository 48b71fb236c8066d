"""Settings of the other methods that train norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remtta.methods.settings.base import MethodConfig, Optimizer, setting


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

    threshold: float = setting(0.9, "in [0, 1)")
    lr: float = 1e-2
    optimizer: Optimizer = "sgd"
    adapt_layers: str | None = "all"


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

    entropy_margin: float = setting(0.4, "> 0 and finite")
    max_cosine: float = setting(0.05, "> 0 and finite")
    probs_momentum: float = setting(0.9, "in [0, 1)")


@dataclass(frozen=True)
class EATAConfig(ETAConfig):
    """Settings of EATA: ETA's, and how much the weights that matter to the source domain are kept.

    Attributes:
        fisher_weight: Weight of the squared distance from the source weights.
        fisher_images: Clean source images that say how much a weight matters.

    The others are those of `ETAConfig`.

    Source: EATA (Niu et al., ICML 2022), arXiv:2204.02610.
    """

    fisher_weight: float = setting(2000.0, ">= 0 and finite")
    fisher_images: int = setting(2000, ">= 1")
    source_settings: ClassVar[tuple[str, ...] | None] = ("adapt_layers", "fisher_images", "precision")


@dataclass(frozen=True)
class RDumbConfig(ETAConfig):
    """Settings of RDumb: ETA's, and when everything is forgotten.

    Attributes:
        reset_every_steps: Steps between two returns to the source weights.

    The others are those of `ETAConfig`.

    Source: RDumb (Press et al., NeurIPS 2023), arXiv:2306.05401.
    """

    lr: float = 2.5e-4
    reset_every_steps: int = setting(1000, ">= 1")


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

    entropy_margin: float = setting(0.4, "> 0 and finite")
    rho: float = setting(0.05, "> 0 and finite")
    reset_below: float = setting(0.2, ">= 0 and finite")
    loss_momentum: float = setting(0.9, "in [0, 1)")


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

    entropy_margin: float = setting(0.5, "> 0 and finite")
    weight_margin: float = setting(0.4, "a finite number")
    plpd_margin: float = setting(0.2, "in [-1, 1)")
    grid: int = setting(4, ">= 2")


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

    clip: float = setting(0.99, "in (0, 1)")
    temperature: float = setting(1 / 3, "> 0 and finite")
    probs_momentum: float = setting(0.9, "in [0, 1]")
    source_momentum: float = setting(0.99, "in [0, 1]")
    prior_on: Literal["probabilities", "logits"] = "probabilities"
    lr: float = 2.5e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True
    adapt_layers: str | None = "all"
    lr_batch: ClassVar[int | None] = 64
    whole_batch: ClassVar[str | None] = "ROID and CMF, which weigh each image against the whole batch"


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

    hidden_momentum: float = setting(0.99, "in [0, 1]")
    process_noise: float = setting(0.005, "in (0, 1)")
    least_kept: float = setting(0.89, "in [0, 1]")
