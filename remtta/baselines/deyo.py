"""DeYO: entropy minimisation where the object's shape decides (Lee et al., ICLR 2024, arXiv:2403.07366)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from remtta.baselines.sar import SARLikeConfig
from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.losses import entropy
from remtta.methods.pixels import shuffle_patches
from remtta.methods.settings.base import Finite, Positive
from remtta.options.option import Bounds


@dataclass(frozen=True)
class DeYOConfig(SARLikeConfig):
    """Settings of DeYO; the defaults are the official code's for ViTs.

    Attributes:
        entropy_margin: Images with lower entropy are candidates; a fraction of ln C.
        weight_margin: Entropy at which a candidate's entropy weight is 1, as a fraction of ln C.
        plpd_margin: Learn from candidates whose label loses more probability than this when the image's patches are
            shuffled.
        grid: Number of patches per row and column of the shuffled image.
    """

    entropy_margin: Positive = 0.5
    weight_margin: Finite = 0.4
    plpd_margin: Annotated[float, Bounds(min=-1, below=1)] = 0.2
    grid: Annotated[int, Bounds(min=2)] = 4


class DeYO(Method[DeYOConfig]):
    """Predict a batch, then minimise the entropy of confident images whose label depends on the object's shape.

    An image counts if its entropy is below the margin and its label loses enough probability (PLPD) when the image's
    patches are shuffled. Its weight is exp(weight margin - H) + exp(PLPD).
    """

    settings = DeYOConfig
    passes_per_step = 2, 1  # the second view is only computed for confident images

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        entropies = entropy(logits)
        certain = (entropies.detach() < self.config.entropy_margin * self.log_classes).nonzero().squeeze(1)
        if not len(certain):
            return LossOutput(logits.unsqueeze(0), entropies.mean(), 0)
        drop = self._probability_drop(images[certain], center, logits.detach()[certain])
        counts = drop > self.config.plpd_margin
        counted = entropies[certain[counts]]
        weights = (self.config.weight_margin * self.log_classes - counted.detach()).exp() + drop[counts].exp()
        return LossOutput(logits.unsqueeze(0), (weights * counted).mean(), int(counts.sum()))

    @torch.no_grad()
    def _probability_drop(self, images: Tensor, center: Center, logits: Tensor) -> Tensor:
        """Return the probability (B,) that each image's label loses when its patches are shuffled."""
        guesses = logits.argmax(-1, keepdim=True)
        shuffled = center(self.model.logits(shuffle_patches(images, self.config.grid, self.model.generator)))
        return (logits.softmax(-1) - shuffled.softmax(-1)).gather(-1, guesses).squeeze(-1)
