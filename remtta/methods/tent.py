"""Tent: entropy minimisation (Wang et al., ICLR 2021, arXiv:2006.10726)."""

from __future__ import annotations

from torch import Tensor, nn

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy
from remtta.methods.settings import TentConfig


class Tent(GradientMethod):
    """Predict a batch, then lower the mean entropy of its predictions.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    _entropy = staticmethod(entropy)

    def __init__(self, model: nn.Module, config: TentConfig | None = None) -> None:
        super().__init__(model, config or TentConfig())

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        return logits.unsqueeze(0), self._entropy(logits).mean(), len(images)
