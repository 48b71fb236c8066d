"""RDumb: ETA with periodic resets (Press et al., NeurIPS 2023, arXiv:2306.05401)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.methods.eta import ETA, ETAConfig
from remtta.methods.settings.base import Count, Positive

_STEPS = "steps"


@dataclass(frozen=True)
class RDumbConfig(ETAConfig):
    """Settings of RDumb: those of ETA, and the reset interval.

    Attributes:
        reset_every_steps: Number of steps between two resets to the source weights.
    """

    lr: Positive = 2.5e-4
    reset_every_steps: Count = 1000


class RDumb(ETA):
    """ETA that resets weights, optimizer and running mean after a number of steps, with or without an update."""

    settings = RDumbConfig
    config: RDumbConfig

    def reset_buffers(self) -> None:
        self.buffers = {_STEPS: torch.tensor(0)}

    def after_batch(self, views: Tensor) -> bool:
        super().after_batch(views)
        self.buffers[_STEPS] += 1
        return int(self.buffers[_STEPS]) >= self.config.reset_every_steps
