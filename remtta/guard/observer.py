"""Answers on their way from the method to its rows, and those who watch and may change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from remtta.guard.evidence import mixture
from remtta.methods.method import Method


@dataclass
class Answers:
    """The answers to one batch.

    Attributes:
        method: Makes the predictions.
        images: Shape (B, 3, H, W), preprocessed.
        learned: Shape (B,), on the CPU: which images the method learns from.
        fit: Shape (B,), on the CPU: which images it may learn from, which what centres logits takes note of; None for
            none.
        early: Whether the images come again, with the rest of their batch.
        adapted: The adapted model's logits (B, C), from before the update; None until asked for.
        source: The source model's; None until asked for.
        weight: The adapted model's share in the answers.
        logits: What is answered, shape (B, C).
        raw: The same before smoothing; None without it.
        undone: Whether the batch showed harm, which was undone.
    """

    method: Method
    images: Tensor
    learned: Tensor
    fit: Tensor | None = None
    early: bool = False
    adapted: Tensor | None = None
    source: Tensor | None = None
    weight: float = 1.0
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    raw: Tensor | None = None
    undone: bool = False

    @property
    def smoothed(self) -> list[bool]:
        """Which of them went by the frames before, too."""
        if self.raw is None:
            return [False] * len(self.logits)
        smoothed: list[bool] = (self.logits != self.raw).any(1).tolist()
        return smoothed

    def ask_adapted(self) -> Tensor:
        """Return the adapted model's logits (B, C), by a forward pass if there was none."""
        if self.adapted is None:
            self.adapted = self.method.predict(self.images, self.fit)
        return self.adapted

    def ask_source(self) -> Tensor:
        """Return the source model's logits (B, C), by a forward pass if there was none."""
        if self.source is None:
            self.source = self.method.predict_source(self.images, self.fit)
        return self.source

    @torch.no_grad()
    def answer_by(self, weight: float) -> None:
        """Answer by the adapted model with this share, and by the source model with the rest."""
        self.weight = weight
        if weight == 0:
            self.logits = self.ask_source()
        elif weight == 1:
            self.logits = self.ask_adapted()
        else:
            source = self.ask_source()  # first: the adapted model's logits are centred by its answers
            self.logits = mixture(self.ask_adapted(), source, weight)


class Observer:
    """Watches a method, batch after batch. Each hook may be left out."""

    def before(self, images: Tensor) -> str | None:
        """Return why the next images (B, 3, H, W) are not to be learned from; None if they are."""
        return None

    def learned(self, answers: Answers) -> None:
        """Take note of an update on a batch's learned images."""

    def answer(self, answers: Answers) -> None:
        """Take note of a batch's answers, and change them if need be."""

    def reset(self) -> None:
        """Take note that the source weights are back."""

    def events(self) -> list[dict[str, Any]]:
        """Return what happened since the last call."""
        return []

    def state(self) -> dict[str, Tensor]:
        """Return everything that later decisions depend on."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned; other entries are left alone."""
