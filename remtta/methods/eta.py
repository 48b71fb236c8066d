"""ETA: entropy minimisation on reliable and varied images (Niu et al., ICML 2022, arXiv:2204.02610)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.filters import cosines, running_mean
from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy
from remtta.methods.settings import ETAConfig

_MEAN_PROBS = "mean_probs"
_CLASSES = 1000  # that the published largest cosine is meant for


class ETA(GradientMethod):
    """Predict a batch, then lower the entropy of its certain images that differ from what came before.

    An image counts if its entropy is under the margin and its probabilities
    have a small cosine with the running mean of those that counted; the first
    batch has no such mean. The lower its entropy, the more it weighs:
    exp(margin - H).

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    _entropy = staticmethod(entropy)

    def __init__(self, model: nn.Module, config: ETAConfig | None = None) -> None:
        self.config = config or ETAConfig()
        super().__init__(model, self.config)
        self._margin = self.config.entropy_margin * math.log(self._backbone.num_classes)
        self._max_cosine = self.config.max_cosine * math.sqrt(_CLASSES / self._backbone.num_classes)
        self._mean_probs: Tensor | None = None

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        kept = self._kept(logits.detach())
        entropies = self._entropy(logits[kept])
        weights = (self._margin - entropies.detach()).exp()
        return logits.unsqueeze(0), (weights * entropies).mean(), int(kept.sum())

    def _kept(self, logits: Tensor) -> Tensor:
        """Which images (B,) are learned from."""
        kept = self._entropy(logits) < self._margin
        if self._mean_probs is not None:
            kept &= cosines(self._mean_probs, logits.softmax(-1)).abs() < self._max_cosine
        return kept

    @torch.no_grad()
    def _after_batch(self, views: Tensor) -> None:
        kept = views[0][self._kept(views[0])]
        if len(kept):
            self._mean_probs = running_mean(self._mean_probs, kept.softmax(-1), self.config.probs_momentum)

    def _own_state(self) -> dict[str, Tensor]:
        return {} if self._mean_probs is None else {_MEAN_PROBS: self._mean_probs}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        if _MEAN_PROBS in state:
            self._mean_probs = state[_MEAN_PROBS].to(self.device)

    def _forget(self) -> None:
        self._mean_probs = None
