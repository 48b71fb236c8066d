"""CoTTA: continual test-time adaptation with a teacher (Wang et al., CVPR 2022, arXiv:2203.13591)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.augmentations import jitter
from remtta.methods.base import Center, Loss, Targets
from remtta.methods.losses import symmetric_cross_entropy
from remtta.methods.settings.base import BelowOne, Count, NoNormsConfig, Optimizer, Positive, Share
from remtta.methods.teacher import Teacher, move_towards, restore_at_random

_COUNTS = "batches"


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
        given = config.augment_below
        self._augment_below = published_confidence(model.num_classes) if given is None else given

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

    def loss(self, images: Tensor, center: Center, teacher: Tensor) -> Loss:
        teacher = center(teacher)
        loss = symmetric_cross_entropy(center(self.run(self.student, images)), teacher).mean()
        return teacher.unsqueeze(0), loss, len(images)

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
