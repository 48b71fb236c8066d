"""Supervised adaptation: the upper bound that the paper's tables end with."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.gradient import GradientMethod
from remtta.methods.settings import SupervisedConfig


class Supervised(GradientMethod):
    """Predict a batch, then train on its true labels. For evaluation only.

    Args:
        model: The classifier, adapted in place.
        config: Settings; REM's by default.
    """

    needs_labels = True

    def __init__(self, model: nn.Module, config: SupervisedConfig | None = None) -> None:
        super().__init__(model, config or SupervisedConfig())

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        if labels is None:
            raise ValueError("supervised adaptation needs labels")
        logits = self._logits(images)
        return logits.unsqueeze(0), F.cross_entropy(logits, labels), len(images)
