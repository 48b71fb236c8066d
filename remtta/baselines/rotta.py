"""RoTTA: robust adaptation from a balanced memory of the stream (Yuan et al., CVPR 2023, arXiv:2303.13899)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from remtta.backbones.batchnorm import running_statistics
from remtta.baselines.augmentations import jitter
from remtta.baselines.teacher import Teacher, move_towards
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput
from remtta.methods.losses import entropy
from remtta.methods.settings.base import (
    BATCH_NORM_SETTINGS,
    BatchNorms,
    BelowOne,
    Count,
    MethodConfig,
    NonNegative,
    PositiveShare,
)

# Of the memory; label -1 is an empty slot.
_IMAGES, _LABELS, _AGES, _ENTROPIES = "images", "labels", "ages", "entropies"
_COUNT, _STATISTICS = "count", "statistics."


@dataclass(frozen=True)
class RoTTAConfig(MethodConfig):
    """Settings of RoTTA; the defaults are the official code's.

    Attributes:
        memory: Number of images in the memory.
        update_every: Number of images between two updates.
        teacher_decay: Share of the teacher's weights kept at each update.
        statistics_share: Weight of the memory's statistics in those of batch norms, which they enter at each update.
        age_weight: Weight of an image's age when the memory decides which one to replace.
        entropy_weight: Weight of its entropy.
    """

    memory: Count = 64
    update_every: Count = 64
    teacher_decay: BelowOne = 0.999
    statistics_share: PositiveShare = 0.05
    age_weight: NonNegative = 1.0
    entropy_weight: NonNegative = 1.0
    adapt_layers: str | None = "all"
    bn: BatchNorms = "recent"  # running statistics change, and are part of the delta
    unused = (*BATCH_NORM_SETTINGS, "micro_batch", "steps", "prediction_step")


class RoTTA(Teacher[RoTTAConfig]):
    """Predict with a teacher; train a student on augmented images of a memory that is balanced over predicted classes.

    An image's score grows with its age and its entropy. A new image replaces the one with the largest score, unless
    that is its own: among its class if this has filled its share of the memory, else, in a full memory, among the
    largest classes. The loss is the cross-entropy of the student with the teacher's predictions of the plain images,
    weighted by sigmoid(-age / memory). In an update, the running statistics of both first move towards the memory's.
    """

    settings = RoTTAConfig
    trains = "norms"
    num_models = 1
    passes_per_step = 3, 1

    def __init__(self, model: AdaptedModel, config: RoTTAConfig) -> None:
        super().__init__(model, config)
        self._statistics = running_statistics(model.backbone.batch_norms)  # the teacher's
        self._student_statistics = {name: tensor.clone() for name, tensor in self._statistics.items()}
        model.use_batch_norms({})  # they use the running statistics
        self._new: tuple[Tensor, Tensor] | None = None  # the last batch and its logits, until `step`

    def reset_buffers(self) -> None:
        super().reset_buffers()
        for name, tensor in self._statistics.items():
            self._student_statistics[name].copy_(tensor)
        self.buffers |= {_STATISTICS + name: tensor for name, tensor in self._student_statistics.items()}
        ages, entropies = torch.zeros(2, self.config.memory, dtype=torch.float64).unbind()
        self.buffers |= {_LABELS: torch.full_like(ages, -1, dtype=torch.int64), _AGES: ages, _ENTROPIES: entropies}
        self.buffers[_COUNT] = torch.tensor(0)

    def predict(self, images: Tensor, *, learn: bool = False, counted: bool = True, latency: bool = False) -> Tensor:
        logits = super().predict(images)
        self._new = (images, logits) if learn else None
        return logits

    @torch.inference_mode(False)
    def step(self, center: Center, labels: Tensor | None = None) -> bool:
        new, self._new = self._new, None
        for image, logits in zip(*new, strict=True) if new else ():
            if not torch.isfinite(logits).all():
                continue
            self._remember(image, center(logits))
            if int(self.buffers[_COUNT]) % self.config.update_every == 0:
                held = (self.buffers[_LABELS] >= 0).to(image.device)
                self.compute_gradients(self.buffers[_IMAGES][held], center)
                self._update_weights()
        return False

    def _remember(self, image: Tensor, logits: Tensor) -> None:
        """Put an image (3, H, W) with these logits (C,) into the memory, if its score is not the largest."""
        config, size, num_classes = self.config, self.config.memory, self.model.num_classes
        labels, ages, entropies = (self.buffers[name] for name in (_LABELS, _AGES, _ENTROPIES))
        label, uncertainty = int(logits.argmax()), entropy(logits).cpu().double()
        counts = labels[labels >= 0].bincount(minlength=num_classes)
        scores = config.age_weight * (ages / size).sigmoid() + config.entropy_weight * entropies / self.log_classes
        score = config.age_weight / 2 + config.entropy_weight * uncertainty / self.log_classes
        if counts[label] >= size / num_classes:
            candidates = labels == label
        elif counts.sum() < size:
            candidates, score = labels < 0, torch.tensor(-torch.inf)
        else:
            candidates = torch.isin(labels, (counts == counts.max()).nonzero())
        slot = int(scores.masked_fill(~candidates, -torch.inf).argmax())
        if scores[slot] > score:
            if _IMAGES not in self.buffers:
                self.buffers[_IMAGES] = image.new_zeros(size, *image.shape)
            self.buffers[_IMAGES][slot] = image
            labels[slot], ages[slot], entropies[slot] = label, 0, uncertainty
        ages += 1
        self.buffers[_COUNT] += 1

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        with torch.no_grad(), RobustNorms(self._statistics, self.config.statistics_share):
            teacher = center(self.model.logits(images))
        views = self.model.pixels.augment(images, jitter, self.model.generator)
        with RobustNorms(self._student_statistics, self.config.statistics_share):
            student = center(self.run({**self.student, **self._student_statistics}, views))
        ages = self.buffers[_AGES][self.buffers[_LABELS] >= 0].to(images)
        losses = F.cross_entropy(student, teacher.softmax(-1), reduction="none")
        return LossOutput(teacher.unsqueeze(0), (losses * (-ages / self.config.memory).sigmoid()).mean(), len(images))

    def after_step(self) -> None:
        move_towards(self.model.weights.parameters, self.student, self.config.teacher_decay)


class RobustNorms(TorchFunctionMode):
    """Context in which batch norms with these running statistics move them towards the batch's, then normalise
    by them.
    """

    def __init__(self, statistics: Mapping[str, Tensor], share: float) -> None:
        super().__init__()
        self._ids, self._share = {id(tensor) for tensor in statistics.values()}, share

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        robust = func is F.batch_norm and id(args[1]) in self._ids
        return (self._normalise if robust else func)(*args, **(kwargs or {}))

    def _normalise(
        self,
        input: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Any = None,
        bias: Any = None,
        *_: Any,
        eps: float,
        **__: Any,
    ) -> Tensor:
        new_variance, new_mean = torch.var_mean(input.to(mean), [0, *range(2, input.ndim)], correction=0)
        new_mean, new_variance = mean.lerp(new_mean, self._share), variance.lerp(new_variance, self._share)
        mean.copy_(new_mean.detach())
        variance.copy_(new_variance.detach())
        scale = (new_variance + eps).rsqrt() * (1 if weight is None else weight)
        shift = (0 if bias is None else bias) - new_mean * scale
        scale, shift = (each.view(-1, *[1] * (input.ndim - 2)) for each in (scale, shift))
        return (input * scale + shift).to(input.dtype)
