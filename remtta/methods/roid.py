"""ROID: certain and varied images, source weights mixed back in (Marsden et al., WACV 2024, arXiv:2306.00650)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.augmentations import PixelSpace, clean_jitter
from remtta.methods.filters import cosines, running_mean
from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy, soft_likelihood_ratio, symmetric_cross_entropy
from remtta.methods.settings import ROIDConfig

_MEAN_PROBS = "mean_probs"


class ROID(GradientMethod):
    """Predict a batch, then train on the images that differ most from what came before.

    An image's diversity is 1 - cosine of its probabilities with their running
    mean, its certainty minus its entropy, both stretched over the batch to
    [0, 1] (0 where all images are alike, as in a batch of one). Images of less
    than mean diversity are left out, the others weigh
    exp(diversity * certainty / temperature). The loss is the soft likelihood
    ratio plus the symmetric cross-entropy with an augmented view, summed over
    them and divided by the batch size. After the step a little of the source
    weights is mixed back in.

    The prediction is corrected for the batch's classes: its probabilities are
    multiplied by the batch's mean probabilities, smoothed. The official code
    multiplies the logits themselves (`prior_on="logits"`), which weighs much
    more for large logits, raises those of rare classes where they are
    negative, and leaves no probabilities to speak of.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    _mean_probs: Tensor

    def __init__(self, model: nn.Module, config: ROIDConfig | None = None) -> None:
        self.config = config or ROIDConfig()
        super().__init__(model, self.config)
        self._pixels = PixelSpace(self._backbone.module)
        self._forget()

    @property
    def num_forwards(self) -> float:
        """Forward passes per image, at most: the augmented view is only of the images that count."""
        return 2 * self.config.steps

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        weights = self._image_weights(logits.detach())
        kept = weights > 0
        views = self._pixels.augment(images[kept], clean_jitter, self._generator)
        losses = soft_likelihood_ratio(logits[kept], self.config.clip)
        losses = losses + symmetric_cross_entropy(self._logits(views), logits[kept])
        return logits.unsqueeze(0), (weights[kept] * losses).sum() / len(images), int(kept.sum())

    @torch.no_grad()
    def _image_weights(self, logits: Tensor) -> Tensor:
        """Weights (B,), zero for the images that are left out."""
        diversity = _stretch(1 - cosines(self._mean_probs, logits.softmax(-1)))
        certainty = _stretch(-entropy(logits))
        weights = (diversity * certainty / self.config.temperature).exp()
        return weights.masked_fill(diversity < diversity.mean(), 0.0)

    @torch.no_grad()
    def _after_step(self) -> None:
        for parameter, source in zip(self._weights.parameters.values(), self._weights.source.values(), strict=True):
            parameter.lerp_(source, 1 - self.config.source_momentum)

    @torch.no_grad()
    def _after_batch(self, views: Tensor) -> None:
        probs = views[0].softmax(-1)
        if torch.isfinite(probs).all():
            self._mean_probs = running_mean(self._mean_probs, probs, self.config.probs_momentum)

    @torch.no_grad()
    def _output(self, logits: Tensor) -> Tensor:
        num_images, num_classes = logits.shape
        prior = logits.softmax(-1).mean(0)
        smoothing = max(1 / num_images, 1 / num_classes) / prior.max()
        smoothed = (prior + smoothing) / (1 + smoothing * num_classes)
        return logits * smoothed if self.config.prior_on == "logits" else logits + smoothed.log()

    def _own_state(self) -> dict[str, Tensor]:
        return {_MEAN_PROBS: self._mean_probs}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self._mean_probs = state[_MEAN_PROBS].to(self.device)

    def _forget(self) -> None:
        classes = self._backbone.num_classes
        self._mean_probs = torch.full((classes,), 1 / classes, device=self.device)


def _stretch(values: Tensor) -> Tensor:
    """Values (B,) moved and scaled to [0, 1]; zeros where they are all the same."""
    low, high = values.min(), values.max()
    return torch.where(high > low, (values - low) / (high - low), torch.zeros_like(values))
