"""RDumb: ETA that starts again from time to time (Press et al., NeurIPS 2023, arXiv:2306.05401)."""

from __future__ import annotations

import torch
from torch import Tensor

from remtta.methods.eta import ETA
from remtta.methods.settings import RDumbConfig

_STEPS = "steps"


class RDumb(ETA):
    """ETA, with weights, optimizer and running mean put back after every so many steps.

    Steps that no image passed the filters for count, too.
    """

    config: RDumbConfig

    def begin(self) -> None:
        self.memory = {_STEPS: torch.tensor(0)}

    def after_batch(self, views: Tensor) -> bool:
        super().after_batch(views)
        self.memory[_STEPS] += 1
        return int(self.memory[_STEPS]) >= self.config.reset_every_steps
