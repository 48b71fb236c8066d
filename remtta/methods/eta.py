"""ETA: entropy minimisation on reliable and varied images (Niu et al., ICML 2022, arXiv:2204.02610)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remtta.methods.filters import cosines, running_mean
from remtta.methods.losses import entropy
from remtta.methods.net import Net
from remtta.methods.objective import Loss, Objective, Targets
from remtta.methods.settings import ETAConfig

_MEAN_PROBS = "mean_probs"
_CLASSES = 1000  # that the published largest cosine is meant for


class ETA(Objective[ETAConfig]):
    """Predict a batch, then lower the entropy of its certain images that differ from what came before.

    An image counts if its entropy is under the margin and its probabilities
    have a small cosine with the running mean of those that counted; the first
    batch has no such mean. The lower its entropy, the more it weighs:
    exp(margin - H).
    """

    entropy = staticmethod(entropy)

    def __init__(self, net: Net, config: ETAConfig) -> None:
        super().__init__(net, config)
        self._margin = config.entropy_margin * math.log(net.num_classes)
        self._max_cosine = config.max_cosine * math.sqrt(_CLASSES / net.num_classes)

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        logits = self.net.logits(images)
        kept = self._kept(logits.detach())
        entropies = self.entropy(logits[kept])
        weights = (self._margin - entropies.detach()).exp()
        return logits.unsqueeze(0), (weights * entropies).mean(), int(kept.sum())

    def _kept(self, logits: Tensor) -> Tensor:
        """Return which images (B,) are learned from."""
        kept = self.entropy(logits) < self._margin
        if _MEAN_PROBS in self.memory:
            kept &= cosines(self.memory[_MEAN_PROBS], logits.softmax(-1)).abs() < self._max_cosine
        return kept

    @torch.no_grad()
    def after_batch(self, views: Tensor) -> bool:
        kept = views[0][self._kept(views[0])]
        if len(kept):
            mean = self.memory.get(_MEAN_PROBS)
            self.memory[_MEAN_PROBS] = running_mean(mean, kept.softmax(-1), self.config.probs_momentum)
        return False
