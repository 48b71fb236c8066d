"""What the methods share in which a student learns from a slowly following teacher."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from remtta.backbones.base import Backbone
from remtta.methods.gradient import GradientMethod
from remtta.methods.randomness import spawn

_STUDENT = "student."


class TeacherMethod(GradientMethod):
    """Predict with a teacher; a student learns from it, and the teacher follows the student.

    The weights in the model are the teacher's: what the model predicts, what
    the method returns and what `delta` holds are one thing. The student is a
    second set of weights that runs through the same model.
    """

    norms_only = False
    num_models = 2
    teacher_decay: float

    def _chosen(self) -> dict[str, nn.Parameter]:
        return dict(self._backbone.module.named_parameters())

    def _trainable(self) -> Mapping[str, Tensor]:
        self._classifier = _Classifier(self._backbone)
        return {name: parameter.detach().clone() for name, parameter in self._weights.parameters.items()}

    def _own_state(self) -> dict[str, Tensor]:
        return {_STUDENT + name: tensor for name, tensor in self._trained.items()}

    @torch.no_grad()
    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._trained.items():
            tensor.copy_(state[_STUDENT + name])

    @torch.inference_mode(False)  # the update is to learn from the same targets
    @torch.no_grad()
    def _answer(self, images: Tensor) -> Tensor:
        targets = self._targets(images, None)
        assert targets is not None
        self._answered_targets = targets
        return self._output(targets.clone())

    @torch.no_grad()
    def _forget(self) -> None:
        self._answered_targets = None
        for name, parameter in self._taught().items():
            self._trained[name].copy_(parameter)

    def _taught(self) -> dict[str, Tensor]:
        """Those of the teacher's weights that the student has, too; the others stay as they are."""
        return {name: parameter for name, parameter in self._weights.parameters.items() if name in self._trained}

    def _after_step(self) -> None:
        follow(self._taught(), self._trained, self.teacher_decay)

    def _run(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Logits (B, C) of images (B, 3, H, W) with these weights, by name, in place of the model's."""
        named = {f"module.{name}": tensor for name, tensor in weights.items()}
        with self._context(images.device):
            logits: Tensor = torch.func.functional_call(self._classifier, named, (images,))
        return logits.float()

    def _in_parts(self, predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Predict a whole batch, at most a micro-batch at a time."""
        return torch.cat([predict(part) for part in images.split(self.part_size(len(images)))])


class _Classifier(nn.Module):
    """The forward pass as a module, whose weights `functional_call` can replace."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.module = backbone.module
        self._backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self._backbone.logits(images)


@torch.no_grad()
def follow(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], decay: float) -> None:
    """Move a teacher's tensors towards the student's, in place: decay * teacher + (1 - decay) * student."""
    for name, tensor in teacher.items():
        tensor.lerp_(student[name], 1 - decay)


@torch.no_grad()
def restore_at_random(
    weights: Mapping[str, Tensor], source: Mapping[str, Tensor], share: float, generator: torch.Generator
) -> None:
    """Put a random share of all values back to those of the source, in place."""
    for name, tensor in weights.items():
        drawn = torch.rand(tensor.shape, generator=spawn(generator, tensor.device), device=tensor.device)
        tensor.copy_(torch.where(drawn < share, source[name], tensor))
