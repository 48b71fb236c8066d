"""ViDA: homeostatic visual domain adapters (Liu et al., ICLR 2024, arXiv:2306.04344)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remtta.backbones.families import with_tokens
from remtta.errors import ModelError
from remtta.methods.augmentations import PixelSpace, jitter
from remtta.methods.losses import symmetric_cross_entropy
from remtta.methods.settings import ViDAConfig
from remtta.methods.teacher import TeacherMethod, follow

_TEACHER, _SCALES = "teacher.", "scales"
_LOW, _HIGH = ".low", ".high"
_UNSURE = 0.1  # of the variance of logits


class ViDA(TeacherMethod):
    """Predict with a teacher; a student learns by low- and high-rank adapters beside its weights.

    An adapter adds scale * up @ down to the weight of a linear layer of the
    attention; it runs folded into that weight, and so it is saved. How unsure
    the teacher is over augmentations, U (a tenth of the variance of its logits,
    averaged over classes and batch), scales the adapters of each batch:
    high-rank by 1 + U and low-rank by 1 - U where U reaches the threshold, the
    other way round below. `predict` keeps the last batch's scales.

    The official code starts from adapters that were trained on the source.
    Here they start at zero: down is random (deviation 1 / rank squared), up is
    zero. The augmentations are CoTTA's. The official code's high-rank scale is
    known never to change; here it does.

    Args:
        model: The classifier, whose weights become the teacher's.
        config: Settings; by default those of the official code for ViT-B.

    Raises:
        ModelError: If its attention has no linear layers.
    """

    def __init__(self, model: nn.Module, config: ViDAConfig | None = None) -> None:
        self.config = config or ViDAConfig()
        self.teacher_decay = self.config.teacher_decay
        super().__init__(model, self.config)
        self._pixels = PixelSpace(self._backbone.module)

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: the teacher's augmented views and its prediction, and the student's."""
        return self.config.steps * (self.config.num_augmentations + 2)

    @property
    def num_backwards(self) -> float:
        """Backward passes per image: the student's."""
        return self.config.steps

    def _trainable(self) -> Mapping[str, Tensor]:
        weights = super()._trainable()
        self._adapted = with_tokens(self._backbone, "ViDA").attention_weights
        if not self._adapted:
            raise ModelError("ViDA adds adapters to the linear layers of softmax attentions; this model has none")
        adapters = self._new_adapters()
        # The teacher's other weights are the model's own.
        self._teacher = {**{name: weights[name].clone() for name in self._adapted}, **self._new_adapters()}
        self._scales = self._new_scales = torch.ones(2)  # low, high
        return {**weights, **adapters}

    def _new_adapters(self) -> dict[str, Tensor]:
        """Adapters that add nothing yet, always the same ones."""
        generator = torch.Generator().manual_seed(0)
        adapters = {}
        for name in self._adapted:
            weight = self._weights.parameters[name]
            for kind, rank in ((_LOW, self.config.low_rank), (_HIGH, self.config.high_rank)):
                down = torch.randn(rank, weight.shape[1], generator=generator) / rank**2
                adapters[f"{name}{kind}.down"] = down.to(weight)
                adapters[f"{name}{kind}.up"] = weight.new_zeros(weight.shape[0], rank)
        return adapters

    def _folded(self, weights: Mapping[str, Tensor], scales: Tensor) -> dict[str, Tensor]:
        """The attention's weights with their adapters, by name."""
        low, high = scales.tolist()
        return {
            name: weights[name]
            + low * (weights[f"{name}{_LOW}.up"] @ weights[f"{name}{_LOW}.down"])
            + high * (weights[f"{name}{_HIGH}.up"] @ weights[f"{name}{_HIGH}.down"])
            for name in self._adapted
        }

    @torch.no_grad()
    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        views = (self._pixels.augment(images, jitter, self._generator) for _ in range(self.config.num_augmentations))
        logits = torch.stack([self._in_parts(self._logits, view) for view in views])
        unsure = _UNSURE * logits.var(0).mean().cpu()
        sign = torch.tensor([-1.0, 1.0]) if unsure >= self.config.threshold else torch.tensor([1.0, -1.0])
        self._new_scales = 1 + sign * unsure
        folded = self._folded(self._teacher, self._new_scales)
        return self._in_parts(lambda part: self._run(folded, part), images)

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        assert labels is not None  # the teacher's logits
        weights = {name: self._trained[name] for name in self._weights.parameters}
        student = self._run({**weights, **self._folded(self._trained, self._new_scales)}, images)
        return labels.unsqueeze(0), symmetric_cross_entropy(student, labels).mean(), len(images)

    @torch.no_grad()
    def _after_step(self) -> None:
        super()._after_step()
        adapters = {name: tensor for name, tensor in self._teacher.items() if name not in self._adapted}
        follow(adapters, self._trained, self.config.adapter_decay)
        follow({name: self._teacher[name] for name in self._adapted}, self._trained, self.teacher_decay)
        self._scales = self._new_scales
        for name, folded in self._folded(self._teacher, self._scales).items():
            self._weights.parameters[name].copy_(folded)

    def _own_state(self) -> dict[str, Tensor]:
        teacher = {_TEACHER + name: tensor for name, tensor in self._teacher.items()}
        return {**super()._own_state(), **teacher, _SCALES: self._scales}

    @torch.no_grad()
    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        super()._load_own_state(state)
        for name, tensor in self._teacher.items():
            tensor.copy_(state[_TEACHER + name])
        self._scales = state[_SCALES].clone()

    @torch.no_grad()
    def _forget(self) -> None:
        super()._forget()
        for name, tensor in self._new_adapters().items():
            self._teacher[name].copy_(tensor)
            self._trained[name].copy_(tensor)
        for name in self._adapted:
            self._teacher[name].copy_(self._weights.parameters[name])
        self._scales = torch.ones(2)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        known = self._weights.parameters
        weights = [tensor for name, tensor in self._trained.items() if name in known]
        adapters = [tensor for name, tensor in self._trained.items() if name not in known]
        return [{"params": weights}, {"params": adapters, "lr": self.config.adapter_lr}]
