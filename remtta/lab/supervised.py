"""Cross-entropy with the true labels: an upper bound."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.settings.base import MethodConfig


class Supervised(Method[MethodConfig]):
    """Predict a batch, then train on its true labels. For evaluation only."""

    needs_labels = True

    def loss(self, images: Tensor, center: Center, labels: Tensor) -> LossOutput:
        logits = center(self.logits(images))
        return LossOutput(logits.unsqueeze(0), F.cross_entropy(logits, labels), len(images))
