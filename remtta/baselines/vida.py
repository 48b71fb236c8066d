"""ViDA: homeostatic visual domain adapters (Liu et al., ICLR 2024, arXiv:2306.04344)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from remtta.backbones.families import with_tokens
from remtta.baselines.augmentations import jitter
from remtta.baselines.losses import symmetric_cross_entropy
from remtta.baselines.teacher import Teacher, move_towards
from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Targets
from remtta.methods.settings.base import BelowOne, Count, NonNegative, NoNormsConfig, Optimizer, Positive
from remtta.options.option import Bounds

_TEACHER = "teacher."
_LOW, _HIGH = ".low", ".high"
_UNSURE = 0.1  # weight of the variance of logits


@dataclass(frozen=True)
class ViDAConfig(NoNormsConfig):
    """Settings of ViDA; by default those of the official code for ViT-B on ImageNet-C, at a batch of 50.

    Attributes:
        low_rank: Rank of the domain-agnostic adapters.
        high_rank: Rank of the domain-specific adapters.
        adapter_lr: Learning rate of the adapters; lr is that of the weights.
        teacher_decay: Share of the teacher's weights kept at each update.
        adapter_decay: Share of the teacher's adapters kept at each update.
        num_augmentations: Number of augmented views for estimating the teacher's uncertainty.
        threshold: Uncertainty from which on the high-rank adapters count more.
    """

    low_rank: Count = 1
    high_rank: Count = 128
    adapter_lr: Positive = 2e-7
    teacher_decay: BelowOne = 0.999
    adapter_decay: BelowOne = 0.8
    num_augmentations: Annotated[int, Bounds(min=2)] = 10
    threshold: NonNegative = 0.2
    lr: Positive = 5e-7
    optimizer: Optimizer = "sgd"
    nesterov: bool = True


class ViDA(Teacher[ViDAConfig]):
    """Predict with a teacher; a student learns through low- and high-rank adapters beside its weights.

    An adapter adds scale * up @ down to the weight of a linear layer in the attention; it runs, and is saved, merged
    into that weight. The teacher's uncertainty over augmentations U (a tenth of the variance of its logits, averaged
    over classes and batch) scales the adapters of each batch: if U reaches the threshold, high-rank by 1 + U and
    low-rank by 1 - U, otherwise the other way round. `predict` keeps the last batch's scales.

    The official code starts from adapters trained on the source. Here they start at zero: down is random (standard
    deviation 1 / rank squared), up is zero. The augmentations are CoTTA's. In the official code, the high-rank scale is
    known never to change; here it does. Raise ModelError if the model's attention has no linear layers.
    """

    settings = ViDAConfig

    def __init__(self, model: AdaptedModel, config: ViDAConfig) -> None:
        super().__init__(model, config)
        self._adapted = with_tokens(model.backbone, "ViDA").attention_weights
        if not self._adapted:
            raise ModelError("ViDA adds adapters to the linear layers of softmax attentions; this model has none")
        self._adapters = self._new_adapters()  # the student's adapters
        self.trained = {**self.student, **self._adapters}
        # The teacher's other weights are the model's own.
        self._teacher = {**{name: self.student[name].clone() for name in self._adapted}, **self._new_adapters()}
        self._new_scales = torch.ones(2)  # low, high
        self.passes_per_step = config.num_augmentations + 2, 1  # of the teacher; its prediction, and the student's

    def _new_adapters(self) -> dict[str, Tensor]:
        """Return initial adapters, which add nothing; always the same."""
        generator = torch.Generator().manual_seed(0)
        adapters = {}
        for name in self._adapted:
            weight = self.model.weights.parameters[name]
            for suffix, rank in ((_LOW, self.config.low_rank), (_HIGH, self.config.high_rank)):
                down = torch.randn(rank, weight.shape[1], generator=generator) / rank**2
                adapters[f"{name}{suffix}.down"] = down.to(weight)
                adapters[f"{name}{suffix}.up"] = weight.new_zeros(weight.shape[0], rank)
        return adapters

    def _folded(self, weights: Mapping[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
        """Return the attention's weights merged with their adapters, by name."""
        low, high = scales.tolist()
        return {
            name: weights[name]
            + low * (weights[f"{name}{_LOW}.up"] @ weights[f"{name}{_LOW}.down"])
            + high * (weights[f"{name}{_HIGH}.up"] @ weights[f"{name}{_HIGH}.down"])
            for name in self._adapted
        }

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        views = (
            self.model.pixels.augment(images, jitter, self.model.generator)
            for _ in range(self.config.num_augmentations)
        )
        logits = torch.stack([self.in_parts(self.model.logits, view) for view in views])
        unsure = _UNSURE * logits.var(0).mean().cpu()
        sign = 1 if unsure >= self.config.threshold else -1
        self._new_scales = torch.stack([1 - sign * unsure, 1 + sign * unsure])
        folded = self._folded(self._teacher, self._new_scales)
        return (self.in_parts(lambda part: self.run(folded, part), images),)

    def loss(self, images: Tensor, center: Center, teacher: Tensor) -> LossOutput:
        teacher = center(teacher)
        student = self.run({**self.student, **self._folded(self.trained, self._new_scales)}, images)
        return LossOutput(teacher.unsqueeze(0), symmetric_cross_entropy(center(student), teacher).mean(), len(images))

    @torch.no_grad()
    def after_step(self) -> None:
        move_towards(self.model.weights.parameters, self.student, self.config.teacher_decay)
        move_towards({name: self._teacher[name] for name in self._adapters}, self.trained, self.config.adapter_decay)
        move_towards({name: self._teacher[name] for name in self._adapted}, self.trained, self.config.teacher_decay)
        for name, folded in self._folded(self._teacher, self._new_scales).items():
            self.model.weights.parameters[name].copy_(folded)

    def reset_buffers(self) -> None:
        super().reset_buffers()
        for name, tensor in self._new_adapters().items():
            self._teacher[name].copy_(tensor)
            self._adapters[name].copy_(tensor)
        for name in self._adapted:
            self._teacher[name].copy_(self.model.weights.parameters[name])
        self.buffers |= {_TEACHER + name: tensor for name, tensor in self._teacher.items()}

    def parameter_groups(self) -> list[dict[str, object]]:
        adapters = {"params": list(self._adapters.values()), "lr": self.config.adapter_lr}
        return [{"params": list(self.student.values())}, adapters]
