"""CoTTA: continual test-time adaptation with a teacher (Wang et al., CVPR 2022, arXiv:2203.13591)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from remtta.methods.augmentations import PixelSpace, jitter
from remtta.methods.losses import symmetric_cross_entropy
from remtta.methods.settings import CoTTAConfig
from remtta.methods.teacher import TeacherMethod, restore_at_random

_COUNTS = "batches"


class CoTTA(TeacherMethod):
    """Predict with a teacher, averaged over augmentations where the source model is unsure; train a student on it.

    The whole batch is augmented or none of it, by the mean confidence of the
    source model. `predict`, which does not adapt, is the plain teacher's.

    Args:
        model: The classifier, whose weights become the teacher's.
        config: Settings; by default those of the official code, with the
            learning rate that later papers use for ViTs.
    """

    num_models = 3  # teacher, student and source

    def __init__(self, model: nn.Module, config: CoTTAConfig | None = None) -> None:
        self.config = config or CoTTAConfig()
        self.teacher_decay = self.config.teacher_decay
        self._counts = torch.zeros(2, dtype=torch.int64)  # batches, and how many were augmented
        super().__init__(model, self.config)
        self._pixels = PixelSpace(self._backbone.module)
        given = self.config.augment_below
        self._augment_below = published_confidence(self._backbone.num_classes) if given is None else given

    @property
    def num_forwards(self) -> float:
        """Forward passes per image, as counted since the last reset: source, student, and the teacher's 1 or 32."""
        batches, augmented = (int(count) for count in self._counts)
        share = augmented / max(1, batches)
        return self.config.steps * (3 + share * (self.config.num_augmentations - 1))

    @property
    def num_backwards(self) -> float:
        """Backward passes per image: the student's."""
        return self.config.steps

    def _trainable(self) -> Mapping[str, Tensor]:
        weights = super()._trainable()
        if self.config.all_parameters:
            return weights
        return {name: tensor for name, tensor in weights.items() if name.rpartition(".")[2] in ("weight", "bias")}

    def _origin(self) -> Mapping[str, Tensor]:
        """The weights whose confidence decides about augmentations, and that restored ones go back to."""
        return self._weights.source

    @torch.no_grad()
    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        origin = self._origin()
        source = self._in_parts(lambda part: self._run(origin, part), images)
        unsure = bool(source.softmax(-1).amax(-1).mean() < self._augment_below)
        self._counts = self._counts + torch.tensor([1, int(unsure)])
        if not unsure:
            return self._in_parts(self._logits, images)
        total = torch.zeros_like(source)
        for _ in range(self.config.num_augmentations):
            augmented = self._pixels.augment(images, jitter, self._generator)
            total += self._in_parts(self._logits, augmented)
        return total / self.config.num_augmentations

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        assert labels is not None  # the teacher's logits
        loss = symmetric_cross_entropy(self._run(self._trained, images), labels).mean()
        return labels.unsqueeze(0), loss, len(images)

    def _after_step(self) -> None:
        super()._after_step()
        self._restore()

    def _restore(self) -> None:
        """Put some of the student's weights back to the source's."""
        restore_at_random(self._trained, self._origin(), self.config.restore, self._generator)

    def _own_state(self) -> dict[str, Tensor]:
        return {**super()._own_state(), _COUNTS: self._counts}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        super()._load_own_state(state)
        self._counts = state[_COUNTS].clone()

    def _forget(self) -> None:
        super()._forget()
        self._counts = torch.zeros_like(self._counts)


def published_confidence(num_classes: int) -> float:
    """The official code's confidence under which CoTTA augments, for CIFAR-10, CIFAR-100 and ImageNet.

    On a line in log C between them, and as for the nearest beyond.
    """
    known = {10: 0.92, 100: 0.72, 1000: 0.1}
    return float(np.interp(math.log(num_classes), [math.log(classes) for classes in known], list(known.values())))
