"""Base of methods with a predictor: a matrix before the classifier that learns, and takes no part in predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.baselines.sar import SARLikeConfig
from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.settings.base import Positive

_PREDICTOR = "predictor."


@dataclass(frozen=True)
class PredictorConfig(SARLikeConfig):
    """Shared settings of methods with a predictor.

    Attributes:
        predictor_lr: Learning rate of the predictor, as a multiple of lr.
    """

    predictor_lr: Positive = 1.0
    adapt_layers: str | None = "all"


Config = TypeVar("Config", bound=PredictorConfig)


class WithPredictor(Method[Config]):
    """Train norms, and a linear map of the features (D, D) that starts as the identity.

    Raise ModelError if the classifier is not a linear layer.
    """

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        heads = model.backbone.classifiers  # two in a distilled model
        self._heads = {name: head for name, head in heads.items() if isinstance(head, nn.Linear | nn.Conv2d)}
        if not heads or len(self._heads) < len(heads):
            name = type(model.backbone.module).__name__
            raise ModelError(f"{type(self).__name__} maps the input of a linear classifier, and {name} has none")
        self.beside: dict[str, Tensor] = {
            _PREDICTOR + name: torch.eye(head.weight.shape[1], device=model.device, dtype=torch.float32)
            for name, head in self._heads.items()
        }
        self.trained = {**self.trained, **self.beside}

    def parameter_groups(self) -> list[dict[str, Any]]:
        predictors = [self.beside[_PREDICTOR + name] for name in self._heads]
        norms = {"params": list(self.model.weights.parameters.values())}
        return [norms, {"params": predictors, "lr": self.config.predictor_lr * self.config.lr}]

    def reset_buffers(self) -> None:
        self.buffers = dict(self.beside)
        for name in self._heads:
            nn.init.eye_(self.beside[_PREDICTOR + name])

    def both_logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, C) of images (B, 3, H, W), and those with the predictor, by one pass of the backbone."""
        hooks = [
            head.register_forward_pre_hook(self._doubled(self.beside[_PREDICTOR + name]))
            for name, head in self._heads.items()
        ]
        try:
            logits, predicted = self.model.logits(images).chunk(2)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, predicted

    @staticmethod
    def _doubled(predictor: Tensor) -> Any:
        """Return a hook that adds the predictor's outputs to a batch of features."""
        return lambda head, inputs: torch.cat([inputs[0], F.linear(inputs[0].flatten(1), predictor).view_as(inputs[0])])
