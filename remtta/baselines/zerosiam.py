"""ZeroSiam: entropy minimisation behind a predictor, aligned with the prediction (Chen et al., ICLR 2026,
arXiv:2509.23183).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remtta.baselines.predictor import PredictorConfig, WithPredictor
from remtta.methods.base import Center, LossOutput, Targets
from remtta.methods.losses import entropy
from remtta.methods.settings.base import NonNegative, Positive


@dataclass(frozen=True)
class ZeroSiamConfig(PredictorConfig):
    """Settings of ZeroSiam; the defaults are the official code's for ViT-B, at a batch of 64.

    Attributes:
        alignment_weight: Weight of the divergence from the prediction.
    """

    alignment_weight: NonNegative = 1.0
    lr: Positive = 5e-3


class ZeroSiam(WithPredictor[ZeroSiamConfig]):
    """Predict a batch, then minimise the mean entropy behind the predictor, and its divergence from the prediction.

    The divergence is the sum of both Kullback-Leibler divergences; the prediction has no gradient.
    """

    settings = ZeroSiamConfig

    def first_view(self, images: Tensor) -> Targets:
        return self.both_logits(images)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits, predicted = map(center, self.take_first_view(images))
        log_p, log_q = logits.detach().log_softmax(-1), predicted.log_softmax(-1)
        apart = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)
        losses = entropy(predicted) + self.config.alignment_weight * apart
        return LossOutput(logits.detach().unsqueeze(0), losses.mean(), len(images))
