"""Supervised adaptation, the upper bound in the paper's tables."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from remtta.methods.base import Center, Loss, Method
from remtta.methods.settings.base import MethodConfig


class Supervised(Method[MethodConfig]):
    """Predict a batch, then train on its true labels. For evaluation only."""

    needs_labels = True

    def loss(self, images: Tensor, center: Center, labels: Tensor) -> Loss:
        logits = center(self.logits(images))
        return logits.unsqueeze(0), F.cross_entropy(logits, labels), len(images)
