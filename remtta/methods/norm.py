"""NORM: batch norms take their statistics from the batch (Schneider et al., NeurIPS 2020, arXiv:2006.16971)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.errors import ModelError
from remtta.methods.net import Net
from remtta.methods.objective import Descent, Objective, Targets
from remtta.methods.settings.base import UPDATE_SETTINGS, MethodConfig


@dataclass(frozen=True)
class NORMConfig(MethodConfig):
    """Settings of NORM: of the shared ones only those of batch norms, episodic and precision are used."""

    unused = (*UPDATE_SETTINGS, "micro_batch")


class NORM(Objective[NORMConfig]):
    """Predict with the batch's statistics in every batch norm; no weight changes.

    With `bn="recent"` the running statistics follow those of recent images, and are the content of a delta.

    Raises:
        ModelError: If the model has no batch norms.
    """

    settings = NORMConfig
    chosen = "none"

    def __init__(self, net: Net, config: NORMConfig) -> None:
        super().__init__(net, config)
        if not net.backbone.batch_norms:
            raise ModelError(
                "norm needs batch norms with running statistics, and the model has none that adapt; "
                "choose another method"
            )
        self.adapts = net.batch_norms.moves
        self.delta_refusal = None if self.adapts else "norm changes nothing, unless --set bn=recent lets it"

    @torch.no_grad()
    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        logits = self.net.logits(images)
        if self.adapts and torch.isfinite(logits).all():
            self.net.batch_norms.follow()
            self.net.weights.commit()
        return logits.unsqueeze(0)

    def passes(self) -> tuple[float, float]:
        return 1.0, 0.0
