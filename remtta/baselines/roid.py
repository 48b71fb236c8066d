"""ROID and CMF: likelihood ratio on confident and diverse images, with earlier weights mixed back in.

Source: Marsden et al., WACV 2024, arXiv:2306.00650; CMF: Lee and Chang, ICLR 2024, openreview.net/forum?id=BllUWdpIOA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.baselines.augmentations import clean_jitter
from remtta.baselines.losses import running_mean, soft_likelihood_ratio, symmetric_cross_entropy
from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.losses import entropy
from remtta.methods.settings.base import MethodConfig, Optimizer, Positive, ProperShare, Share

_MEAN_PROBS, _BATCH_SIZE = "mean_probs", "batch_size"
_HIDDEN, _VARIANCE = "hidden.", "hidden_variance"
_PARAMETERS = 38_400  # number for which CMF's published process noise is meant


@dataclass(frozen=True)
class ROIDConfig(MethodConfig):
    """Settings of ROID; the defaults are the official code's for ViTs, at a batch of 64.

    Attributes:
        clip: Upper bound of probabilities in the soft likelihood ratio.
        temperature: Temperature of the weights exp(diversity * certainty / temperature).
        probs_momentum: Share of the running mean of the probabilities kept at each update.
        source_momentum: Share of the adapted weights kept after each step; the rest comes from the source weights.
        prior_on: What the batch's smoothed class prior multiplies: "probabilities" or, as in the official code,
            "logits".
    """

    clip: ProperShare = 0.99
    temperature: Positive = 1 / 3
    probs_momentum: Share = 0.9
    source_momentum: Share = 0.99
    prior_on: Literal["probabilities", "logits"] = "probabilities"
    lr: Positive = 2.5e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True
    adapt_layers: str | None = "all"
    lr_batch = 64
    unused = ("micro_batch",)  # each image is weighed against the whole batch


class ROID(Method[ROIDConfig]):
    """Predict a batch, then train on the images that differ most from earlier ones.

    An image's diversity is 1 - cosine of its probabilities with their running mean, its certainty minus its entropy,
    both rescaled over the batch to [0, 1] (0 if all images are alike, as in a batch of one). Images of less than mean
    diversity are excluded; the others have the weight exp(diversity * certainty / temperature). The loss is the soft
    likelihood ratio plus the symmetric cross-entropy with an augmented view, summed over them and divided by the size
    of the largest batch so far, so that the rest of a domain counts less. After the step, a small share of the source
    weights is mixed back in.

    The prediction is corrected for the batch's classes: its probabilities are multiplied by the batch's smoothed mean
    probabilities. The official code multiplies the logits themselves (`prior_on="logits"`), which has a much stronger
    effect on large logits, raises negative logits of rare classes, and does not yield meaningful probabilities.
    """

    settings = ROIDConfig
    passes_per_step = 2, 2  # the augmented view is only computed for images that count

    def reset_buffers(self) -> None:
        classes = self.model.num_classes
        self.buffers = {_MEAN_PROBS: torch.full((classes,), 1 / classes, device=self.model.device)}
        self.buffers[_BATCH_SIZE] = torch.zeros((), device=self.model.device)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        weights = self._image_weights(logits.detach())
        selected = weights > 0
        views = self.model.pixels.augment(images[selected], clean_jitter, self.model.generator)
        losses = soft_likelihood_ratio(logits[selected], self.config.clip)
        losses = losses + symmetric_cross_entropy(center(self.model.logits(views)), logits[selected])
        batch_size = self.buffers[_BATCH_SIZE].clamp_(min=len(images))
        return LossOutput(logits.unsqueeze(0), (weights[selected] * losses).sum() / batch_size, int(selected.sum()))

    @torch.no_grad()
    def _image_weights(self, logits: Tensor) -> Tensor:
        diversity = _stretch(1 - F.cosine_similarity(self.buffers[_MEAN_PROBS], logits.softmax(-1)))
        certainty = _stretch(-entropy(logits))
        weights = (diversity * certainty / self.config.temperature).exp()
        return weights.masked_fill(diversity < diversity.mean(), 0.0)

    @torch.no_grad()
    def after_step(self) -> None:
        self.model.weights.pull(1 - self.config.source_momentum)

    @torch.no_grad()
    def after_batch(self, views: Tensor) -> bool:
        probs = views[0].softmax(-1)
        if torch.isfinite(probs).all():
            self.buffers[_MEAN_PROBS] = running_mean(self.buffers[_MEAN_PROBS], probs, self.config.probs_momentum)
        return False

    @torch.no_grad()
    def output(self, logits: Tensor) -> Tensor:
        num_images, num_classes = logits.shape
        prior = logits.softmax(-1).mean(0)
        smoothing = max(1 / num_images, 1 / num_classes) / prior.max()
        smoothed = (prior + smoothing) / (1 + smoothing * num_classes)
        return logits * smoothed if self.config.prior_on == "logits" else logits + smoothed.log()


@dataclass(frozen=True)
class CMFConfig(ROIDConfig):
    """Settings of CMF: those of ROID, and of the hidden weights, which the adapted weights are observations of.

    Attributes:
        source_momentum: Share of the hidden weights kept at each step; the rest comes from the source weights.
        hidden_momentum: Share of the adapted weights kept after each step; the rest comes from the hidden weights.
        process_noise: Growth of the hidden weights' variance per step, for the 38,400 norm parameters of a ViT-B/16;
            scaled by their number.
        least_kept: Minimum share of the hidden weights kept after an observation.
    """

    hidden_momentum: Share = 0.99
    process_noise: ProperShare = 0.005
    least_kept: Share = 0.89


class CMF(ROID):
    """ROID with hidden weights, in place of the source weights, mixed back in.

    A Kalman filter tracks the hidden weights: they drift towards the source and are observed through the adapted ones.
    Only the adapted parameters have copies.
    """

    settings = CMFConfig
    config: CMFConfig

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.buffers |= {_HIDDEN + name: tensor.clone() for name, tensor in self.model.weights.source.items()}
        self.buffers[_VARIANCE] = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def after_step(self) -> None:
        drift, noise = self.config.source_momentum, self.config.process_noise * self.num_trained / _PARAMETERS
        predicted = drift**2 * float(self.buffers[_VARIANCE]) + noise
        selected = max((1 - noise) / (predicted + 1 - noise), self.config.least_kept)
        self.buffers[_VARIANCE].fill_(selected * predicted)
        source = self.model.weights.source
        for name, parameter in self.model.weights.parameters.items():
            hidden = self.buffers[_HIDDEN + name]
            hidden.lerp_(source[name], 1 - drift)
            hidden.lerp_(parameter, 1 - selected)
            parameter.lerp_(hidden, 1 - self.config.hidden_momentum)


def _stretch(values: Tensor) -> Tensor:
    """Rescale values (B,) to [0, 1]; zeros if they are all equal."""
    low, high = values.min(), values.max()
    return torch.where(high > low, (values - low) / (high - low), torch.zeros_like(values))
