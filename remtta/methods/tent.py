"""Tent: entropy minimisation (Wang et al., ICLR 2021, arXiv:2006.10726)."""

from __future__ import annotations

from torch import Tensor

from remtta.methods.losses import entropy
from remtta.methods.objective import Loss, Objective, Targets
from remtta.methods.settings import TentConfig


class Tent(Objective[TentConfig]):
    """Predict a batch, then lower the mean entropy of its predictions."""

    entropy = staticmethod(entropy)

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        logits = self.net.logits(images)
        return logits.unsqueeze(0), self.entropy(logits).mean(), len(images)
