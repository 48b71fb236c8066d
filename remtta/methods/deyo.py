"""DeYO: entropy minimisation where the object's shape decides (Lee et al., ICLR 2024, arXiv:2403.07366)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from remtta.methods.filters import shuffle_patches
from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy
from remtta.methods.settings import DeYOConfig


class DeYO(GradientMethod):
    """Predict a batch, then lower the entropy of certain images whose label needs the object's shape.

    An image counts if its entropy is under the margin and its label loses
    enough probability (PLPD) when the image's patches are shuffled. It weighs
    exp(weight margin - H) + exp(PLPD).

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    def __init__(self, model: nn.Module, config: DeYOConfig | None = None) -> None:
        self.config = config or DeYOConfig()
        super().__init__(model, self.config)
        log_classes = math.log(self._backbone.num_classes)
        self._margin = self.config.entropy_margin * log_classes
        self._weight_margin = self.config.weight_margin * log_classes

    @property
    def num_forwards(self) -> float:
        """Forward passes per image, at most: the second is only for certain ones."""
        return 2 * self.config.steps

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""
        return self.config.steps

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        entropies = entropy(logits)
        certain = (entropies.detach() < self._margin).nonzero().squeeze(1)
        if not len(certain):
            return logits.unsqueeze(0), entropies.mean(), 0
        drop = self._probability_drop(images[certain], logits.detach()[certain])
        counts = drop > self.config.plpd_margin
        kept = entropies[certain[counts]]
        weights = (self._weight_margin - kept.detach()).exp() + drop[counts].exp()
        return logits.unsqueeze(0), (weights * kept).mean(), int(counts.sum())

    @torch.no_grad()
    def _probability_drop(self, images: Tensor, logits: Tensor) -> Tensor:
        """How much probability (B,) the label of each image loses when its patches are shuffled."""
        guesses = logits.argmax(-1, keepdim=True)
        shuffled = self._logits(shuffle_patches(images, self.config.grid, self._generator))
        return (logits.softmax(-1) - shuffled.softmax(-1)).gather(-1, guesses).squeeze(-1)
