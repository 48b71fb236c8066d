"""CoTTA and PETAL: continual test-time adaptation with a teacher.

Source: Wang et al., CVPR 2022, arXiv:2203.13591; PETAL: Brahma and Rai, CVPR 2023, arXiv:2212.09713.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.baselines.augmentations import jitter
from remtta.baselines.losses import symmetric_cross_entropy
from remtta.baselines.source_statistics import SourceStatistics
from remtta.baselines.teacher import Teacher, move_towards, restore_at_random
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Targets
from remtta.methods.settings.base import BelowOne, Count, NonNegative, NoNormsConfig, Optimizer, Positive, Share

_COUNTS = "batches"
_MEAN, _VARIANCE = "mean.", "variance."
_MIN_VARIANCE = 1e-6


@dataclass(frozen=True)
class CoTTAConfig(NoNormsConfig):
    """Settings of CoTTA; those of the official code, but with the learning rate that later papers use for ViTs.

    Attributes:
        teacher_decay: Share of the teacher's weights kept at each update.
        num_augmentations: Number of augmented views that the teacher averages.
        augment_below: Augment if the source model's mean confidence over the batch is lower than this. None for the
            official code's values: 0.92 for 10 classes, 0.72 for 100, 0.1 for 1,000, interpolated in log C.
        restore: Probability of restoring each weight to the source.
    """

    teacher_decay: BelowOne = 0.999
    num_augmentations: Count = 32
    augment_below: Share | None = None
    restore: BelowOne = 0.001
    lr: Positive = 1e-4
    optimizer: Optimizer = "sgd"
    nesterov: bool = True


class CoTTA(Teacher[CoTTAConfig]):
    """Predict with a teacher, averaged over augmentations if the source model is unsure; train a student on its
    predictions.

    The mean confidence of the source model decides whether the whole batch is augmented. `predict`, which does not
    adapt, uses the plain teacher.
    """

    settings = CoTTAConfig
    num_models = 3  # teacher, student and source

    def __init__(self, model: AdaptedModel, config: CoTTAConfig) -> None:
        super().__init__(model, config)
        threshold = config.augment_below
        self._augment_below = published_confidence(model.num_classes) if threshold is None else threshold

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.buffers[_COUNTS] = torch.zeros(2, dtype=torch.int64)  # number of batches, and of augmented ones

    def passes(self) -> tuple[float, float]:
        """Return the passes since the last reset: source, student, 1 or 32 of the teacher; backward the student's."""
        batches, augmented = self.buffers[_COUNTS].tolist()
        share = augmented / max(1, batches)
        return self.config.steps * (3 + share * (self.config.num_augmentations - 1)), self.config.steps

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        weights = self.model.weights.source
        source = self.in_parts(lambda part: self.run(weights, part), images)
        unsure = bool(source.softmax(-1).amax(-1).mean() < self._augment_below)
        self.buffers[_COUNTS] += torch.tensor([1, int(unsure)])
        if not unsure:
            return (self.in_parts(self.model.logits, images),)
        total = torch.zeros_like(source)
        for _ in range(self.config.num_augmentations):
            total += self.in_parts(self.model.logits, self.model.pixels.augment(images, jitter, self.model.generator))
        return (total / self.config.num_augmentations,)

    def loss(self, images: Tensor, center: Center, teacher: Tensor) -> LossOutput:
        teacher = center(teacher)
        loss = symmetric_cross_entropy(center(self.run(self.student, images)), teacher).mean()
        return LossOutput(teacher.unsqueeze(0), loss, len(images))

    def after_step(self) -> None:
        move_towards(self.model.weights.parameters, self.student, self.config.teacher_decay)
        self.restore()

    def restore(self) -> None:
        """Restore some of the student's weights to the source's."""
        restore_at_random(self.student, self.model.weights.source, self.config.restore, self.model.generator)


def published_confidence(num_classes: int) -> float:
    """Return the official code's confidence threshold for CIFAR-10, CIFAR-100 and ImageNet, linear in log C between."""
    known = {10: 0.92, 100: 0.72, 1000: 0.1}
    return float(np.interp(math.log(num_classes), [math.log(classes) for classes in known], list(known.values())))


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


class PETAL(CoTTA, SourceStatistics[CoTTAConfig]):
    """CoTTA with a student that stays near the posterior of the source weights.

    The loss adds posterior_weight / 2 * sum (theta - mean)^2 / (variance + 1e-6) over the student's weights. After the
    step, the weights with the smallest squared gradients (below an interpolated quantile over all weights) are restored
    to the source, where CoTTA selects at random.

    The posterior is SWAG's diagonal one: mean and variance of the weights along SGD on clean images. Since streams have
    no labels, it is assumed that each step uses the source model's own predictions as labels. `state` does not contain
    the posterior: pass it to `use_source` before resuming.
    """

    settings = PETALConfig
    source_settings = ("swag_lr", "bn", "bn_prior", "precision")
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
                labels = self.run(source, images).argmax(-1)
            optimizer.zero_grad()
            F.cross_entropy(self.run(weights, images), labels).backward()
            optimizer.step()
            for name, tensor in weights.items():  # Welford's running variance
                off = tensor.detach() - mean[name]
                mean[name] += off / count
                spread[name] += off * (tensor.detach() - mean[name])
        statistics = {_MEAN + name: tensor.cpu() for name, tensor in mean.items()}
        return {**statistics, **{_VARIANCE + name: (tensor / count).cpu() for name, tensor in spread.items()}}

    def loss(self, images: Tensor, center: Center, teacher: Tensor) -> LossOutput:
        views, loss, count = super().loss(images, center, teacher)
        return LossOutput(views, loss + self.config.posterior_weight * self._distance(), count)

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
