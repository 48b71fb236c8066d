"""A batch's predictions, the result of the update, and transforms of predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor


@dataclass(frozen=True)
class Prediction:
    """The predictions of one batch, from before the update that `learn` makes.

    Attributes:
        logits: Logits of the predictions, shape (B, C).
        learned: Which images `learn` updates by, unless the prediction is harmful; shape (B,), on the CPU.
        num_updates: Number of updates that the adapted weights had seen since the start or a reset.
        weight: The adapted model's weight in the predictions, 0 to 1.
        harmful: Whether the guard found harm, so that the source model predicts, and `learn` restores its weights.
        skipped: Reason why no image of the batch is learned from, if it is the schedule; else None.
        source: The source model's own prediction, centered logits (B, C), if it predicted.
        adapted: The adapted model's own prediction, likewise.
        raw_source: The source model's logits (B, C), not centered.
        shifted: Whether these are of shifted copies of the images.
        raw_adapted: The adapted model's logits, likewise; of interpolated weights if both models predict in one pass.
        early: Whether the images come again, with the rest of their batch.
        unsmoothed: `logits` before smoothing; None without it.
        temperature: By which `logits` were divided; None if they are not scaled.
        estimates: Estimated accuracies of the last frames, including these.
    """

    logits: Tensor
    learned: Tensor
    num_updates: int = 0
    weight: float = 1.0
    harmful: bool = False
    skipped: str | None = None
    source: Tensor | None = None
    adapted: Tensor | None = None
    raw_source: Tensor | None = None
    shifted: bool = False
    raw_adapted: Tensor | None = None
    early: bool = False
    unsmoothed: Tensor | None = None
    temperature: float | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def smoothed(self) -> list[bool]:
        """For each image, True if its prediction was smoothed with earlier frames."""
        if self.unsmoothed is None:
            return [False] * len(self.logits)
        return (self.logits != self.unsmoothed).any(1).tolist()

    def without_first(self, count: int) -> Prediction:
        """Return the prediction without its first `count` images."""
        tensors: dict[str, Any] = {
            name: value[count:] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True)
class Update:
    """The result of learning from the images of a prediction: updates of the weights, a reset, or neither.

    Attributes:
        num_steps: Updates of the weights, without those that the guard undid.
        reset: True if the source weights were restored, by the guard or by the method itself.
    """

    num_steps: int = 0
    reset: bool = False


class PredictionTransform:
    """Changes or completes a batch's prediction. Every hook has a default.

    Attributes:
        prefix: Of the names of its state among those of the pipeline.
    """

    prefix: ClassVar[str]

    def __call__(self, prediction: Prediction) -> Prediction:
        """Return the prediction, changed if needed."""
        return prediction

    def on_reset(self) -> None:
        """Called after `reset` or a new stream restored the source weights; not after a rollback of the guard."""

    def on_new_stream(self) -> None:
        """Forget the stream so far: an independent one starts."""

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        return []

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that later predictions depend on."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
