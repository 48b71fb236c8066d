"""Cross-entropy with the model's own labels (Lee, ICML Workshop 2013)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.settings.base import BelowOne, MethodConfig, Optimizer, Positive


@dataclass(frozen=True)
class PseudoLabelConfig(MethodConfig):
    """Settings of Pseudo-label.

    Attributes:
        threshold: Minimum probability of a prediction that serves as a label.
    """

    threshold: BelowOne = 0.9
    lr: Positive = 1e-2
    optimizer: Optimizer = "sgd"
    adapt_layers: str | None = "all"


class PseudoLabel(Method[PseudoLabelConfig]):
    """Predict a batch, then train on its confident predictions as if they were labels."""

    settings = PseudoLabelConfig

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        confidence, guess = logits.detach().softmax(-1).max(-1)
        confident = confidence > self.config.threshold
        loss = F.cross_entropy(logits[confident], guess[confident])
        return LossOutput(logits.unsqueeze(0), loss, int(confident.sum()))
