"""Tent: entropy minimisation (Wang et al., ICLR 2021, arXiv:2006.10726)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.losses import entropy
from remtta.methods.settings.base import MethodConfig, Optimizer, Positive


@dataclass(frozen=True)
class TentConfig(MethodConfig):
    """Settings of Tent; the defaults are the official code's for ViTs, at a batch of 64."""

    lr: Positive = 1e-3
    optimizer: Optimizer = "sgd"
    adapt_layers: str | None = "all"
    lr_batch = 64


class Tent(Method[TentConfig]):
    """Predict a batch, then minimise the mean entropy of its predictions."""

    settings = TentConfig
    entropy = staticmethod(entropy)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        return LossOutput(logits.unsqueeze(0), self.entropy(logits).mean(), len(images))
