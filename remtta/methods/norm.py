"""NORM: batch norms take their statistics from the batch (Schneider et al., NeurIPS 2020, arXiv:2006.16971)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from remtta.errors import ModelError
from remtta.methods.adapting import AdaptingMethod
from remtta.methods.settings import NORMConfig


class NORM(AdaptingMethod):
    """Predict with the batch's statistics in every batch norm; no weight changes.

    With `bn_momentum` the running statistics follow those of the batches, and
    are what a delta holds.

    Args:
        model: A classifier with batch norms, frozen.
        config: Settings; by default the batch's statistics alone, from 16 images on.

    Raises:
        ModelError: If the model has no batch norms.
    """

    num_forwards = 1.0
    num_backwards = 0.0
    num_trained = 0

    def __init__(self, model: nn.Module, config: NORMConfig | None = None) -> None:
        self.config = config or NORMConfig()
        super().__init__(model, self.config)
        if not self._backbone.batch_norms:
            raise ModelError(
                "norm needs batch norms with running statistics, and the model has none that adapt; "
                "choose another method"
            )
        self.adapts = bool(self.config.bn_momentum)
        self.delta_refusal = None if self.adapts else "norm changes nothing, unless --set bn_momentum=... lets it"

    @torch.no_grad()
    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        self._batch_norms.begin()
        logits = self._logits(images)
        if self.adapts and torch.isfinite(logits).all():
            self._batch_norms.follow(self.config.bn_momentum)
            self._weights.commit()
        return logits.unsqueeze(0)

    def _chosen(self) -> dict[str, nn.Parameter]:
        return {}
