"""Pseudo-label (Lee, ICML Workshop 2013), as the test-time literature runs it."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.gradient import GradientMethod
from remtta.methods.settings import PseudoLabelConfig


class PseudoLabel(GradientMethod):
    """Predict a batch, then train on its own confident predictions as if they were labels.

    Args:
        model: The classifier, adapted in place.
        config: Settings; the threshold says how confident.
    """

    def __init__(self, model: nn.Module, config: PseudoLabelConfig | None = None) -> None:
        self.config = config or PseudoLabelConfig()
        super().__init__(model, self.config)

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        confidence, guess = logits.detach().softmax(-1).max(-1)
        confident = confidence > self.config.threshold
        loss = F.cross_entropy(logits[confident], guess[confident])
        return logits.unsqueeze(0), loss, int(confident.sum())
