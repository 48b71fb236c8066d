"""A batch's predictions on their way through the pipeline, and callbacks that may change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

_NONE = torch.empty(0)


@dataclass
class Prediction:
    """The predictions of one batch.

    Attributes:
        logits: Logits of the predictions, shape (B, C).
        source: The source model's own prediction, centered logits (B, C), if it predicted.
        adapted: The adapted model's own prediction, from before the update, likewise.
        raw_source: The source model's logits (B, C), not centered.
        raw_adapted: The adapted model's logits, likewise; of interpolated weights if both models predict in one pass.
        weight: The adapted model's weight in the predictions, 0 to 1.
        learned: Which images the method learns from, shape (B,), on the CPU.
        early: Whether the images come again, with the rest of their batch.
        harmful: Whether the batch showed harm, so that the source model predicts, without an update; or its update did.
        unsmoothed: `logits` before smoothing; None without it.
        temperature: By which `logits` were divided; None if they are not scaled.
        estimates: Estimated accuracies of the last frames, including these.
    """

    logits: Tensor = _NONE
    source: Tensor | None = None
    adapted: Tensor | None = None
    raw_source: Tensor | None = None
    raw_adapted: Tensor | None = None
    weight: float = 1.0
    learned: Tensor = _NONE
    early: bool = False
    harmful: bool = False
    unsmoothed: Tensor | None = None
    temperature: float | None = None
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def smoothed(self) -> list[bool]:
        """For each image, True if its prediction was smoothed with earlier frames."""
        if self.unsmoothed is None:
            return [False] * len(self.logits)
        return (self.logits != self.unsmoothed).any(1).tolist()


class Callback:
    """Receives a batch's predictions, and may change them. Every hook has a default.

    Attributes:
        prefix: Of the names of its state among those of the pipeline.
    """

    prefix: ClassVar[str]

    def on_prediction(self, prediction: Prediction) -> None:
        """Handle a batch's predictions, and change them if needed."""

    def on_reset(self) -> None:
        """Handle that the source weights were restored, by `reset` or for a new stream."""

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
