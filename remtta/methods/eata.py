"""EATA: ETA that preserves weights important to the source domain (Niu et al., ICML 2022, arXiv:2204.02610)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, Loss
from remtta.methods.eta import ETA, ETAConfig
from remtta.methods.settings.base import Count, NonNegative

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EATAConfig(ETAConfig):
    """Settings of EATA: those of ETA, and of the penalty that preserves important weights.

    Attributes:
        fisher_weight: Weight of the squared distance from the source weights.
        fisher_images: Number of clean source images for estimating the importance of weights.
    """

    fisher_weight: NonNegative = 2000.0
    fisher_images: Count = 2000
    source_settings = ("adapt_layers", "fisher_images", "bn", "bn_prior", "micro_batch", "precision")


class EATA(ETA):
    """ETA with a penalty on leaving the source weights: sum of F (theta - theta_source)^2, times a factor.

    F is the diagonal of the Fisher information: as in the official code, the mean over batches of clean source images
    of the squared gradient of the cross-entropy against the model's own labels. The gradient is a batch's mean, so F
    depends on the batch size, which is 64 there and in `remtta.methods.source_data`.
    """

    settings = EATAConfig
    needs_source_data = True
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
            _log.warning("EATA learned from %d source images, fewer than %d", wanted - left, wanted)
        return {name: (total / num_batches).cpu() for name, total in zip(self.trained, sums, strict=True)}

    def set_statistics(self, statistics: Mapping[str, Tensor]) -> None:
        """Weight the penalty by this Fisher information; raise ValueError if it belongs to other parameters."""
        shapes = {name: parameter.shape for name, parameter in self.trained.items()}
        if {name: tensor.shape for name, tensor in statistics.items()} != shapes:
            raise ValueError("the source statistics are of other parameters than the adapted ones")
        super().set_statistics(statistics)

    def _label_gradients(self, images: Tensor) -> list[Tensor]:
        """Return the gradient of the mean cross-entropy against the model's own labels, per adapted parameter."""
        parameters = list(self.trained.values())
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for part in images.split(self.part_size(len(images))):
            logits = self.model.check_gradients(self.model.logits(part))
            loss = F.cross_entropy(logits, logits.detach().argmax(-1), reduction="sum") / len(images)
            torch._foreach_add_(sums, torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
        return sums

    def loss(self, images: Tensor, center: Center) -> Loss:
        views, loss, count = super().loss(images, center)
        source = self.model.weights.source
        fisher = self.statistics
        terms = [(fisher[name] * (weight - source[name]).square()).sum() for name, weight in self.trained.items()]
        return views, loss + self.config.fisher_weight * torch.stack(terms).sum(), count
