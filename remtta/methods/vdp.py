"""VDP: visual domain prompts (Gan et al., AAAI 2023, arXiv:2212.04145)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import symmetric_cross_entropy
from remtta.methods.randomness import integer
from remtta.methods.settings import VDPConfig
from remtta.methods.teacher import follow
from remtta.models.preprocessing import preprocessing_of

_SPECIFIC, _AGNOSTIC = "specific", "agnostic"
_TEACHER, _SENSITIVITY = "teacher.", "sensitivity"


class VDP(GradientMethod):
    """Predict with a teacher's pixel prompts; a student's learn from it, and the model stays as it is.

    Two squares of numbers are added to every preprocessed image: one for the
    domain of the moment, free to move, and one for what the domains share. The
    latter's numbers are held near the teacher's, the more so the more
    sensitive the loss has been to them (a running mean of its gradients' size).

    Not compared with official code, of which none could be read: this follows
    the paper's idea, and its constants are this project's. Assumed: the squares
    lie at two random places, the same in every run, start at zero and may
    overlap; loss and teacher are CoTTA's, without augmentations.

    Args:
        model: The classifier, frozen.
        config: Settings.
    """

    delta_refusal = "VDP learns pixel prompts, which are no weights of the model"

    def __init__(self, model: nn.Module, config: VDPConfig | None = None) -> None:
        self.config = config or VDPConfig()
        super().__init__(model, self.config)

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: teacher and student."""
        return 2 * self.config.steps

    @property
    def num_backwards(self) -> float:
        """Backward passes per image: the student's."""
        return self.config.steps

    def _chosen(self) -> dict[str, nn.Parameter]:
        return {}

    def _trainable(self) -> Mapping[str, Tensor]:
        size = preprocessing_of(self._backbone.module).input_size
        side = [max(1, round(self.config.prompt_share * length)) for length in size]
        generator = torch.Generator().manual_seed(0)
        self._places = {
            name: [integer(generator, 0, length - part) for length, part in zip(size, side, strict=True)]
            for name in (_SPECIFIC, _AGNOSTIC)
        }
        self._teacher = {name: torch.zeros(3, *side, device=self.device) for name in self._places}
        self._sensitivity = torch.zeros_like(self._teacher[_AGNOSTIC])
        return {name: tensor.clone() for name, tensor in self._teacher.items()}

    @torch.no_grad()
    def predict_alone(self, images: Tensor) -> Tensor:
        """Logits (B, C) with the teacher's prompts, without adapting."""
        return self._logits(self._prompted(images, self._teacher))

    def _prompted(self, images: Tensor, prompts: Mapping[str, Tensor]) -> Tensor:
        images = images.clone()
        for name, prompt in prompts.items():
            (top, left), (height, width) = self._places[name], prompt.shape[1:]
            images[..., top : top + height, left : left + width] += prompt
        return images

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        target = self.predict(images)
        logits = self._logits(self._prompted(images, self._trained))
        held = (self._sensitivity * (self._trained[_AGNOSTIC] - self._teacher[_AGNOSTIC]).square()).sum()
        loss = symmetric_cross_entropy(logits, target).mean() + self.config.homeostasis * held
        return target.unsqueeze(0), loss, len(images)

    @torch.no_grad()
    def _before_step(self) -> None:
        gradient = self._trained[_AGNOSTIC].grad
        assert gradient is not None
        follow({_SENSITIVITY: self._sensitivity}, {_SENSITIVITY: gradient.abs()}, self.config.teacher_decay)

    @torch.no_grad()
    def _after_step(self) -> None:
        follow(self._teacher, self._trained, self.config.teacher_decay)

    def _own_state(self) -> dict[str, Tensor]:
        teacher = {_TEACHER + name: tensor for name, tensor in self._teacher.items()}
        return {**self._trained, **teacher, _SENSITIVITY: self._sensitivity}

    @torch.no_grad()
    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._own_state().items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def _forget(self) -> None:
        for tensor in self._own_state().values():
            tensor.zero_()
