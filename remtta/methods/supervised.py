"""Supervised adaptation, the upper bound in the paper's tables."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from remtta.methods.objective import Loss, Objective, Targets
from remtta.methods.settings.base import MethodConfig


class Supervised(Objective[MethodConfig]):
    """Predict a batch, then train on its true labels. For evaluation only."""

    needs_labels = True

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        logits = self.net.logits(images)
        return logits.unsqueeze(0), F.cross_entropy(logits, targets[0]), len(images)
