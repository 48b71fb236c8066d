"""ETA: entropy minimisation on reliable and diverse images (Niu et al., ICML 2022, arXiv:2204.02610)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, Loss, Method
from remtta.methods.losses import entropy, running_mean
from remtta.methods.settings.base import BelowOne, Positive
from remtta.methods.tent import TentConfig

_MEAN_PROBS = "mean_probs"
_CLASSES = 1000  # number for which the published largest cosine is meant


@dataclass(frozen=True)
class ETAConfig(TentConfig):
    """Settings of ETA; the defaults are the official code's for ViTs, at a batch of 64.

    Attributes:
        entropy_margin: Learn only from images with lower entropy; a fraction of ln C.
        max_cosine: Of those, learn only from images whose probabilities have a smaller cosine with the running mean.
            The value is for 1,000 classes and scaled by sqrt(1000 / C), like the cosine of a one-hot prediction with a
            uniform mean.
        probs_momentum: Share of the running mean of the probabilities kept at each update.
    """

    entropy_margin: Positive = 0.4
    max_cosine: Positive = 0.05
    probs_momentum: BelowOne = 0.9


class ETA(Method[ETAConfig]):
    """Predict a batch, then minimise the entropy of confident images that differ from earlier ones.

    An image counts if its entropy is below the margin and its probabilities have a small cosine with the running mean
    of those that counted; for the first batch there is no such mean. Its weight is exp(margin - H).
    """

    settings = ETAConfig
    entropy = staticmethod(entropy)

    def __init__(self, model: AdaptedModel, config: ETAConfig) -> None:
        super().__init__(model, config)
        self._margin = config.entropy_margin * math.log(model.num_classes)
        self._max_cosine = config.max_cosine * math.sqrt(_CLASSES / model.num_classes)

    def loss(self, images: Tensor, center: Center) -> Loss:
        logits = center(self.logits(images))
        kept = self._kept(logits.detach())
        entropies = self.entropy(logits[kept])
        weights = (self._margin - entropies.detach()).exp()
        return logits.unsqueeze(0), (weights * entropies).mean(), int(kept.sum())

    def _kept(self, logits: Tensor) -> Tensor:
        """Return which images (B,) are learned from."""
        kept = self.entropy(logits) < self._margin
        if _MEAN_PROBS in self.buffers:
            kept &= F.cosine_similarity(self.buffers[_MEAN_PROBS], logits.softmax(-1)).abs() < self._max_cosine
        return kept

    @torch.no_grad()
    def after_batch(self, views: Tensor) -> bool:
        kept = views[0][self._kept(views[0])]
        if len(kept):
            mean = self.buffers.get(_MEAN_PROBS)
            self.buffers[_MEAN_PROBS] = running_mean(mean, kept.softmax(-1), self.config.probs_momentum)
        return False
