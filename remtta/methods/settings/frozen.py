"""Settings of the methods that leave the weights as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from remtta.errors import check
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, NO_WEIGHTS, UPDATE_SETTINGS, MethodConfig, setting

Affinity = Literal["knn", "rbf", "linear"]


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "centre", "micro_batch")


@dataclass(frozen=True)
class CentreConfig(MethodConfig):
    """Settings of centred logits alone: of the shared ones only episodic and precision are used."""

    centre: bool = True
    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "micro_batch")

    def __post_init__(self) -> None:
        check(self.centre, "centre", self.centre, "true: without it this is the method source")
        super().__post_init__()


@dataclass(frozen=True)
class NORMConfig(MethodConfig):
    """Settings of NORM: of the shared ones only those of batch norms, episodic and precision are used.

    Source: Improving robustness against common corruptions by covariate shift adaptation, arXiv:2006.16971.
    """

    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, "micro_batch")


@dataclass(frozen=True)
class LAMEConfig(MethodConfig):
    """Settings of LAME, which takes no step: of the shared ones only micro_batch and precision are used.

    Attributes:
        affinity: Whom a prediction is pulled to: "knn", its nearest neighbours in
            the batch, as the paper has it; "rbf", everybody by a Gaussian of
            the distance, the official code's default; "linear", everybody by
            the cosine of the features.
        neighbours: Nearest neighbours for "knn". For "rbf" the Gaussian's
            deviation is the mean distance to the one of this number, the image
            itself being the first. "linear" has no use for it.

    Source: Parameter-free Online Test-time Adaptation, arXiv:2201.05718.
    """

    affinity: Affinity = "knn"
    neighbours: int = setting(5, ">= 1")
    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic")


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

    num_prompts: int = setting(3, ">= 1")
    population: int | None = setting(None, ">= 4")
    distance_weight: float = setting(0.4, ">= 0 and finite")
    shift_decay: float = setting(0.9, "in [0, 1)")
    unused: ClassVar[tuple[str, ...]] = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "centre")
    source_settings: ClassVar[tuple[str, ...] | None] = ("precision",)

    def __post_init__(self) -> None:
        check(self.steps == 1, "steps", self.steps, "1, a generation per batch")
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

    prompt_share: float = setting(0.25, "in (0, 1]")
    teacher_decay: float = setting(0.999, "in [0, 1)")
    homeostasis: float = setting(1.0, ">= 0 and finite")
    unused: ClassVar[tuple[str, ...]] = NO_WEIGHTS
    no_layers: ClassVar[str | None] = "as no weight changes"
