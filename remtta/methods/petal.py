"""PETAL: a probabilistic framework for lifelong adaptation (Brahma and Rai, CVPR 2023, arXiv:2212.09713)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.base import Center, Loss
from remtta.methods.cotta import CoTTA, CoTTAConfig
from remtta.methods.settings.base import BelowOne, NonNegative, Positive

_MEAN, _VARIANCE = "mean.", "variance."
_MIN_VARIANCE = 1e-6


@dataclass(frozen=True)
class PETALConfig(CoTTAConfig):
    """Settings of PETAL in addition to CoTTA's; by default those of the official code.

    The learning rate, too, is the official code's, for a ResNet-50.

    Attributes:
        restore: Share of the weights, those with the smallest squared gradients, that are restored to the source.
        posterior_weight: Weight of the distance to the source's posterior.
        swag_lr: Learning rate of the steps on clean images that estimate the posterior.
    """

    restore: BelowOne = 0.003
    posterior_weight: NonNegative = 1e-11
    swag_lr: Positive = 1e-4
    lr: Positive = 1e-2
    source_settings = ("swag_lr", "bn", "bn_prior", "precision")


class PETAL(CoTTA):
    """CoTTA with a student that stays near the posterior of the source weights.

    The loss adds posterior_weight / 2 * sum (theta - mean)^2 / (variance + 1e-6) over the student's weights. After the
    step, the weights with the smallest squared gradients (below an interpolated quantile over all weights) are restored
    to the source, where CoTTA selects at random.

    The posterior is SWAG's diagonal one: mean and variance of the weights along SGD on clean images. Since streams have
    no labels, it is assumed that each step uses the source model's own predictions as labels. `state` does not contain
    the posterior: pass it to `use_source` before resuming.
    """

    settings = PETALConfig
    needs_source_data = True
    num_models = 5  # teacher, student, source, and the posterior's mean and variance
    config: PETALConfig

    @torch.enable_grad()
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return mean and variance of the weights along SGD from the source, with a step per batch of clean images."""
        source = self.model.weights.source
        weights = {name: tensor.clone().requires_grad_() for name, tensor in source.items()}
        mean = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        spread = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        optimizer = torch.optim.SGD(weights.values(), lr=self.config.swag_lr, momentum=0.9)
        count = 0
        for count, images in enumerate(batches, start=1):
            with torch.no_grad():
                answers = self.run(source, images).argmax(-1)
            optimizer.zero_grad()
            F.cross_entropy(self.run(weights, images), answers).backward()
            optimizer.step()
            for name, tensor in weights.items():  # Welford's running variance
                off = tensor.detach() - mean[name]
                mean[name] += off / count
                spread[name] += off * (tensor.detach() - mean[name])
        statistics = {_MEAN + name: tensor.cpu() for name, tensor in mean.items()}
        return {**statistics, **{_VARIANCE + name: (tensor / count).cpu() for name, tensor in spread.items()}}

    def loss(self, images: Tensor, center: Center, teacher: Tensor) -> Loss:
        views, loss, count = super().loss(images, center, teacher)
        return views, loss + self.config.posterior_weight * self._distance(), count

    def _distance(self) -> Tensor:
        """Return half the squared Mahalanobis distance of the student's weights from the source's posterior."""
        known = self.statistics
        terms = [
            ((tensor - known[_MEAN + name]).square() / (known[_VARIANCE + name] + _MIN_VARIANCE)).sum()
            for name, tensor in self.student.items()
        ]
        return 0.5 * torch.stack(terms).sum()

    @torch.no_grad()
    def before_step(self) -> None:
        squared = {name: t.grad.square() for name, t in self.student.items() if t.grad is not None}
        flat = torch.cat([tensor.flatten() for tensor in squared.values()])
        position = self.config.restore * (len(flat) - 1)
        below = int(position)
        least, next_least = flat.topk(below + 2, largest=False).values[-2:]  # torch.quantile takes at most 16 M values
        threshold = least + (next_least - least) * (position - below)
        self._unimportant = {name: tensor < threshold for name, tensor in squared.items()}

    @torch.no_grad()
    def restore(self) -> None:
        source = self.model.weights.source
        for name, unimportant in self._unimportant.items():
            weight = self.student[name]
            weight.copy_(torch.where(unimportant, source[name], weight))
