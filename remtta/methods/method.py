"""What a method is, to those that run one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from remtta.models.weights import Committed


class Method(Protocol):
    """What `adapt_stream` and `evaluate` ask of a method."""

    @property
    def adapts(self) -> bool:
        """Whether a batch changes the weights."""

    @property
    def needs_labels(self) -> bool:
        """Whether it learns from true labels."""

    @property
    def needs_source(self) -> bool:
        """Whether it learns from clean images of the source domain first."""

    @property
    def most_source_images(self) -> int | None:
        """Of how many of them at most; None for all."""

    @property
    def norms_only(self) -> bool:
        """Whether only normalisation weights change, so that a delta is small."""

    @property
    def delta_refusal(self) -> str | None:
        """Why what it learns cannot be saved as a delta, if it cannot."""

    @property
    def num_models(self) -> int:
        """Copies of the model it holds."""

    @property
    def num_trained(self) -> int:
        """Numbers that it learns: weights, prompts, adapters."""

    @property
    def num_forwards(self) -> float:
        """Forward passes per image."""

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the parameters that adapt."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the current weights have seen."""

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""

    @property
    def last_views(self) -> Tensor | None:
        """Logits (L, B, C) behind the last batch's prediction, the plain view first."""

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict logits (B, C) for preprocessed images (B, 3, H, W), then adapt."""

    def answer(self, images: Tensor) -> Tensor:
        """Predict logits (B, C) at once; `learn` then adapts to the same images."""

    def learn(self, labels: Tensor | None = None) -> None:
        """Adapt to the images of the last `answer`."""

    def predict(self, images: Tensor) -> Tensor:
        """Predict without adapting."""

    def predict_source(self, images: Tensor) -> Tensor:
        """What the source weights predict."""

    def drift(self) -> float:
        """Norm of the change since the source over the norm of the source weights."""

    def reset(self) -> None:
        """Back to the source weights, exactly."""

    def enter(self) -> None:
        """Put the adapted weights in the model, after `leave`."""

    def leave(self) -> None:
        """Have the source weights in the model, for another method to use it meanwhile."""

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source, by parameter name."""

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta."""

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """What it learns from preprocessed source images (B, 3, H, W), if `needs_source`."""

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with what `source_statistics` returned."""

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on, beside what was learned from source images."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
