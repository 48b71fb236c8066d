"""A method for remtta in its own package: Tent that learns from every tenth batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.methods.objective import Descent, Loss, Targets
from remtta.methods.settings.base import Count, Preset
from remtta.methods.tent import Tent, TentConfig


@dataclass(frozen=True)
class TentEveryConfig(TentConfig):
    """Settings of TentEvery.

    Attributes:
        every: Learn from the last of so many batches.
    """

    every: Count = 10


class TentEvery(Tent):
    """Predict every batch, and learn from every N-th."""

    settings = TentEveryConfig
    preset = Preset({"anchor": 0.01}, action="rollback", answer="both")  # guarded, as `remtta` is
    config: TentEveryConfig

    def begin(self) -> None:
        self.memory = {"batches": torch.zeros((), dtype=torch.int64)}  # saved in states: a stopped run goes on

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        views, loss, count = super().loss(images, targets)
        due = (self.memory["batches"] + 1) % self.config.every == 0
        return views, loss, count if due else 0  # of 0 images nothing is learned

    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        views = super().adapt(descent, images, labels, targets)
        self.memory["batches"] += 1
        return views
