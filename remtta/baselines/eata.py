"""ETA, EATA and RDumb: entropy minimisation on reliable and diverse images.

Source: Niu et al., ICML 2022, arXiv:2204.02610; RDumb: Press et al., NeurIPS 2023, arXiv:2306.05401.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.baselines.losses import running_mean
from remtta.baselines.source_statistics import SourceStatistics
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.losses import entropy
from remtta.methods.settings.base import BelowOne, Count, NonNegative, Positive
from remtta.methods.tent import TentConfig

_MEAN_PROBS, _STEPS = "mean_probs", "steps"
_CLASSES = 1000  # number for which the published largest cosine is meant

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ETAConfig(TentConfig):
    """Settings of ETA; the defaults are the official code's for ViTs, at a batch of 64.

    Attributes:
        entropy_margin: Update only on images with lower entropy; a fraction of ln C.
        max_cosine: Of those, use only images whose probabilities have a smaller cosine with the running mean.
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
        self._margin = config.entropy_margin * self.log_classes
        self._max_cosine = config.max_cosine * math.sqrt(_CLASSES / model.num_classes)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        selected = self._selected(logits.detach())
        entropies = self.entropy(logits[selected])
        weights = (self._margin - entropies.detach()).exp()
        return LossOutput(logits.unsqueeze(0), (weights * entropies).mean(), int(selected.sum()))

    def _selected(self, logits: Tensor) -> Tensor:
        selected = self.entropy(logits) < self._margin
        if _MEAN_PROBS in self.buffers:
            selected &= F.cosine_similarity(self.buffers[_MEAN_PROBS], logits.softmax(-1)).abs() < self._max_cosine
        return selected

    @torch.no_grad()
    def after_batch(self, views: Tensor) -> bool:
        selected = views[0][self._selected(views[0])]
        if len(selected):
            mean = self.buffers.get(_MEAN_PROBS)
            self.buffers[_MEAN_PROBS] = running_mean(mean, selected.softmax(-1), self.config.probs_momentum)
        return False


@dataclass(frozen=True)
class EATAConfig(ETAConfig):
    """Settings of EATA: those of ETA, and of the penalty that preserves important weights.

    Attributes:
        fisher_weight: Weight of the squared distance from the source weights.
        fisher_images: Number of clean source images for estimating the importance of weights.
    """

    fisher_weight: NonNegative = 2000.0
    fisher_images: Count = 2000


class EATA(ETA, SourceStatistics[ETAConfig]):
    """ETA with a penalty on leaving the source weights: sum of F (theta - theta_source)^2, times a factor.

    F is the diagonal of the Fisher information: as in the official code, the mean over batches of clean source images
    of the squared gradient of the cross-entropy against the model's own labels. The gradient is a batch's mean, so F
    depends on the batch size, which is 64 there and in `remtta.methods.source_data`.
    """

    settings = EATAConfig
    source_settings = ("adapt_layers", "fisher_images", "bn", "bn_prior", "micro_batch", "precision")
    config: EATAConfig

    def __init__(self, model: AdaptedModel, config: EATAConfig) -> None:
        super().__init__(model, config)
        self.max_source_images = config.fisher_images

    @torch.enable_grad()
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the Fisher information of each adapted weight, by parameter name, from the first `fisher_images`."""
        sums = [torch.zeros_like(parameter) for parameter in self.trained.values()]
        left, num_batches = self.config.fisher_images, 0
        for batch in batches:
            images = batch[:left]
            gradients = self._label_gradients(images)
            torch._foreach_addcmul_(sums, gradients, gradients)
            left, num_batches = left - len(images), num_batches + 1
            if not left:
                break
        if left:
            wanted = self.config.fisher_images
            _log.warning("EATA's Fisher information is from %d source images, fewer than %d", wanted - left, wanted)
        return {name: (total / num_batches).cpu() for name, total in zip(self.trained, sums, strict=True)}

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Weight the penalty by this Fisher information; raise ValueError if it belongs to other parameters."""
        shapes = {name: parameter.shape for name, parameter in self.trained.items()}
        if {name: tensor.shape for name, tensor in statistics.items()} != shapes:
            raise ValueError("the source statistics are of other parameters than the adapted ones")
        super().use_source(statistics)

    def _label_gradients(self, images: Tensor) -> list[Tensor]:
        """Return the gradient of the mean cross-entropy against the model's own labels, per adapted parameter."""
        parameters = list(self.trained.values())
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for part in images.split(self.part_size(len(images))):
            logits = self.model.check_gradients(self.model.logits(part))
            loss = F.cross_entropy(logits, logits.detach().argmax(-1), reduction="sum") / len(images)
            torch._foreach_add_(sums, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
        return sums

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        views, loss, count = super().loss(images, center)
        source = self.model.weights.source
        fisher = self.statistics
        terms = [(fisher[name] * (weight - source[name]).square()).sum() for name, weight in self.trained.items()]
        return LossOutput(views, loss + self.config.fisher_weight * torch.stack(terms).sum(), count)


@dataclass(frozen=True)
class RDumbConfig(ETAConfig):
    """Settings of RDumb: those of ETA, and the reset interval.

    Attributes:
        reset_every_steps: Number of steps between two resets to the source weights.
    """

    lr: Positive = 2.5e-4
    reset_every_steps: Count = 1000


class RDumb(ETA):
    """ETA that resets weights, optimizer and running mean after a number of steps, with or without an update."""

    settings = RDumbConfig
    config: RDumbConfig

    def reset_buffers(self) -> None:
        self.buffers = {_STEPS: torch.tensor(0)}

    def after_batch(self, views: Tensor) -> bool:
        super().after_batch(views)
        self.buffers[_STEPS] += 1
        return int(self.buffers[_STEPS]) >= self.config.reset_every_steps
