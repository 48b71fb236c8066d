"""Predictions on their way from the method to rows, and the observers that may change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.guard.evidence import mixture
from remtta.methods.method import Method

_NONE = torch.empty(0)


@dataclass
class Answers:
    """The predictions of one batch."""

    method: Method
    images: Tensor = _NONE  # shape (B, 3, H, W), preprocessed
    learned: Tensor = _NONE  # shape (B,), on the CPU: which images the method learns from
    # Shape (B,), on the CPU: which images it may learn from, and may update the centring; None for none.
    fit: Tensor | None = None
    early: bool = False  # whether the images come again, with the rest of their batch
    shifts: bool = False  # whether the source model sees the images shifted if both models answer
    adapted: Tensor | None = None  # the adapted model's logits (B, C), from before the update; None until needed
    source: Tensor | None = None  # the source model's logits (B, C); None until needed
    weight: float = 1.0  # the adapted model's weight in the predictions
    logits: Tensor = _NONE  # the logits of the predictions, shape (B, C)
    raw: Tensor | None = None  # the same before smoothing; None without it
    undone: bool = False  # whether the batch showed harm that was undone, or outputs that are not finite
    # Estimated accuracies of the last frames, including these.
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def smoothed(self) -> list[bool]:
        """For each prediction, True if it was smoothed with earlier frames."""
        if self.raw is None:
            return [False] * len(self.logits)
        return (self.logits != self.raw).any(1).tolist()

    def learned_of(self, logits: Tensor) -> Tensor:
        """Return the rows of logits (B, C) of the learned images."""
        return logits if self.learned.all() else logits[self.learned.to(logits.device)]

    def compute_adapted(self) -> Tensor:
        """Return the adapted model's logits (B, C), computing them if necessary."""
        if self.adapted is None:
            self.adapted = self.method.predict(self.images, self.fit)
        return self.adapted

    def compute_source(self) -> Tensor:
        """Return the source model's logits (B, C), computing them if necessary."""
        if self.source is None:
            images = shifted(self.images) if self.shifts else self.images
            self.source = self.method.predict_source(images, self.fit)
        return self.source

    @torch.no_grad()
    def mix(self, weight: float) -> None:
        """Mix the models' predictions, the adapted model's with this weight."""
        self.weight = weight
        if weight == 0:
            if self.shifts:  # the source model answers alone, so it sees the images as they are
                fit = self.fit if self.source is None else None  # else the copies have updated the centring
                self.source = self.method.predict_source(self.images, fit)
            self.logits = self.compute_source()
        elif weight == 1:
            self.logits = self.compute_adapted()
        else:
            source = self.compute_source()  # first: the adapted model's centring uses them
            self.logits = mixture(self.compute_adapted(), source, weight)


def shifted(images: Tensor) -> Tensor:
    """Shift images (B, 3, H, W) down and right by 1/28 of their sides: half a patch of 16 in 224 pixels.

    Edges are mirrored. A model's errors on an image and on its copy differ, so their mean is more accurate.
    """
    height, width = images.shape[-2:]
    down, right = max(1, height // 28), max(1, width // 28)
    return F.pad(images, (right, 0, down, 0), mode="reflect")[..., :height, :width]


class Observer:
    """Monitors a method, batch by batch. Every hook has a default.

    Attributes:
        prefix: Of the names of its state among those of all observers.
    """

    prefix: ClassVar[str]

    def learned(self, answers: Answers) -> None:
        """Handle an update on a batch's learned images."""

    def answer(self, answers: Answers) -> None:
        """Handle a batch's predictions, and change them if needed."""

    def reset(self) -> None:
        """Handle the restoration of the source weights."""

    def restart(self) -> None:
        """Handle the start of an independent stream, after `reset`."""

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call."""
        return []

    def state(self) -> dict[str, Tensor]:
        """Return everything that later decisions depend on."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
