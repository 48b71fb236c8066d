"""VDP: visual domain prompts (Gan et al., AAAI 2023, arXiv:2212.04145)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.baselines.losses import symmetric_cross_entropy
from remtta.baselines.teacher import move_towards
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.pixels import integer
from remtta.methods.settings.base import BelowOne, NonNegative, NoNormsConfig, PositiveShare
from remtta.models.preprocessing import preprocessing_of

_SPECIFIC, _AGNOSTIC = "specific", "agnostic"
_TEACHER, _SENSITIVITY = "teacher.", "sensitivity"


@dataclass(frozen=True)
class VDPConfig(NoNormsConfig):
    """Settings of VDP. No official code was available: the values are this project's, the teacher's are CoTTA's.

    Attributes:
        prompt_share: Height and width of a prompt relative to the image.
        teacher_decay: Share of the teacher's prompts kept at each update.
        homeostasis: Weight of the penalty on changes of sensitive values in the domain-agnostic prompt.
    """

    prompt_share: PositiveShare = 0.25
    teacher_decay: BelowOne = 0.999
    homeostasis: NonNegative = 1.0


class VDP(Method[VDPConfig]):
    """Predict with a teacher's pixel prompts, from which a student's learn; the model does not change.

    Two squares of values are added to every preprocessed image: a domain-specific one that moves freely, and a
    domain-agnostic one for what the domains share. The latter's values are held near the teacher's, the more strongly
    the more sensitive the loss has been to them (a running mean of the gradients' magnitude).

    Not compared with official code, of which none was available: this follows the paper's idea with its own constants.
    Assumptions: the squares lie at two random places that are the same in every run, start at zero and may overlap;
    loss and teacher are CoTTA's, without augmentations.
    """

    settings = VDPConfig
    passes_per_step = 2, 1  # teacher and student
    trains = "none"
    delta_refusal = "VDP learns pixel prompts, which are not weights of the model"

    def __init__(self, model: AdaptedModel, config: VDPConfig) -> None:
        super().__init__(model, config)
        self._size = size = preprocessing_of(model.model).input_size
        side = [max(1, round(config.prompt_share * length)) for length in size]
        generator = torch.Generator().manual_seed(0)
        self._places = {
            name: [integer(generator, 0, length - part) for length, part in zip(size, side, strict=True)]
            for name in (_SPECIFIC, _AGNOSTIC)
        }
        self._teacher = {name: torch.zeros(3, *side, device=model.device) for name in self._places}
        self._sensitivity = torch.zeros_like(self._teacher[_AGNOSTIC])
        self.trained = {name: tensor.clone() for name, tensor in self._teacher.items()}

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model.logits(self._prompted(images, self._teacher))

    def _prompted(self, images: Tensor, prompts: Mapping[str, Tensor]) -> Tensor:
        if images.shape[-2:] != self._size:
            raise ValueError(
                f"VDP's prompts are for images of {self._size}, and these are of {tuple(images.shape[-2:])}"
            )
        images = images.clone()
        for name, prompt in prompts.items():
            (top, left), (height, width) = self._places[name], prompt.shape[1:]
            images[..., top : top + height, left : left + width] += prompt
        return images

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        teacher = center(self.logits(images))
        logits = center(self.model.logits(self._prompted(images, self.trained)))
        held = (self._sensitivity * (self.trained[_AGNOSTIC] - self._teacher[_AGNOSTIC]).square()).sum()
        loss = symmetric_cross_entropy(logits, teacher).mean() + self.config.homeostasis * held
        return LossOutput(teacher.unsqueeze(0), loss, len(images))

    @torch.no_grad()
    def before_step(self) -> None:
        gradient = self.trained[_AGNOSTIC].grad
        assert gradient is not None
        self._sensitivity.lerp_(gradient.abs(), 1 - self.config.teacher_decay)

    def after_step(self) -> None:
        move_towards(self._teacher, self.trained, self.config.teacher_decay)

    def reset_buffers(self) -> None:
        teacher = {_TEACHER + name: tensor for name, tensor in self._teacher.items()}
        self.buffers = {**self.trained, **teacher, _SENSITIVITY: self._sensitivity}
        for tensor in self.buffers.values():
            tensor.zero_()
