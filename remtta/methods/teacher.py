"""Base of methods in which a student learns from a slowly moving teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.backbones.backbone import Backbone
from remtta.methods.augmentations import spawn
from remtta.methods.net import Net
from remtta.methods.objective import Config, Objective, Targets

_STUDENT = "student."


class Teacher(Objective[Config]):
    """Predict with a teacher; a student learns from it, and the teacher follows the student.

    The model holds the teacher's weights: the model's prediction, the method's, and `delta` all refer to the teacher.
    The student is a second set of weights that runs through the same model.
    """

    chosen = "all"
    num_models = 2

    def __init__(self, net: Net, config: Config) -> None:
        super().__init__(net, config)
        self.student = {name: parameter.detach().clone() for name, parameter in net.weights.parameters.items()}
        self.trained = self.student
        self._classifier = _Classifier(net.backbone)

    def answer(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        targets = self.targets(images, None)
        return self.output(targets[0].clone()), targets

    def begin(self) -> None:
        for name, parameter in self.net.weights.parameters.items():
            self.student[name].copy_(parameter)
        self.memory = {_STUDENT + name: tensor for name, tensor in self.trained.items()}

    def run(self, weights: Mapping[str, Tensor], images: Tensor) -> Tensor:
        """Return logits (B, C) of images (B, 3, H, W) with these weights, by name, in place of the model's."""
        named = {f"module.{name}": tensor for name, tensor in weights.items()}
        with self.net.context(images.device):
            logits: Tensor = torch.func.functional_call(self._classifier, named, (images,))
        return self.net.head(logits)  # the centre follows the teacher alone


class _Classifier(nn.Module):
    """The forward pass as a module whose weights `functional_call` can replace."""

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
    """Restore a random share of all values to the source's, in place."""
    for name, tensor in weights.items():
        drawn = torch.rand(tensor.shape, generator=spawn(generator, tensor.device), device=tensor.device)
        tensor.copy_(torch.where(drawn < share, source[name], tensor))
