"""Base of methods with a student that is trained on a slowly moving teacher's predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from remtta.backbones.backbone import Backbone
from remtta.baselines.augmentations import spawn
from remtta.methods.adapted_model import AdaptedModel, TrainedWeights
from remtta.methods.base import Config, Method, Targets

_STUDENT = "student."


class Teacher(Method[Config]):
    """Predict with a teacher; a student is trained on its predictions, and the teacher follows the student.

    The model holds the teacher's weights: the model's prediction, the method's, and `delta` all refer to the teacher.
    The student is a second set of weights that runs through the same model.
    """

    trains: ClassVar[TrainedWeights] = "all"
    num_models = 2

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        self.student = {name: parameter.detach().clone() for name, parameter in model.weights.parameters.items()}
        self.trained = self.student
        self._classifier = _Classifier(model.backbone)

    def keeps_graph(self, batch_size: int) -> bool:
        return False  # the teacher predicts

    def predict_with_targets(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        targets = self.targets(images, None)
        return targets[0].clone(), targets

    def reset_buffers(self) -> None:
        for name, parameter in self.model.weights.parameters.items():
            self.student[name].copy_(parameter)
        self.buffers = {_STUDENT + name: tensor for name, tensor in self.trained.items()}

    def run(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return logits (B, C) of images (B, 3, H, W) with these weights, by name, in place of the model's."""
        named = {f"module.{name}": tensor for name, tensor in weights.items()}
        with self.model.context(images.device):
            logits: Tensor = torch.func.functional_call(self._classifier, named, (images,))
        return logits.float()


class _Classifier(nn.Module):
    """The forward pass as a module whose weights `functional_call` can replace."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.module = backbone.module
        self._backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self._backbone.logits(images)


@torch.no_grad()
def move_towards(teacher: Mapping[str, Tensor], student: Mapping[str, Tensor], decay: float) -> None:
    """Move a teacher's tensors towards the student's, in place: decay * teacher + (1 - decay) * student."""
    for name, tensor in teacher.items():
        tensor.lerp_(student[name], 1 - decay)


@torch.no_grad()
def restore_at_random(
    weights: Mapping[str, Tensor], source: Mapping[str, Tensor], share: float, generator: torch.Generator
) -> None:
    """Restore a random share of all values to the source's, in place."""
    for name, tensor in weights.items():
        drawn = torch.rand(tensor.shape, generator=spawn(generator, tensor.device), device=tensor.device)
        tensor.copy_(torch.where(drawn < share, source[name], tensor))
