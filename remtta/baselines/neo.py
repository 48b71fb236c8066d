"""NEO: features centered before the classifier, without training (Murphy et al., ICLR 2026, arXiv:2510.05635)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, BatchNorms, MethodConfig, PositiveShare

_MEAN, _COUNT = "mean", "count"


@dataclass(frozen=True)
class NEOConfig(MethodConfig):
    """Settings of NEO, which trains nothing: of the shared ones only episodic, micro_batch and precision are used.

    Attributes:
        alpha: Weight of a batch in the running mean, which starts at zero, as in NEO-Continual (there 0.1). None for
            the mean of all images, as in NEO.
    """

    alpha: PositiveShare | None = None
    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "center")


class NEO(Method[NEOConfig]):
    """Subtract from the features that enter the classifier their mean over all images so far, the batch included.

    A linear classifier gives logits W z + b of features z, and of z - mean(z) these logits minus their mean, plus b.
    So only the mean logits need to be known. Raise ModelError if no layer is known to return the logits.
    """

    settings = NEOConfig
    trains = "none"
    predicts_after_update = True
    passes_per_step = 1, 0
    delta_refusal = "NEO centers features, and changes no weights"

    def __init__(self, model: AdaptedModel, config: NEOConfig) -> None:
        super().__init__(model, config)
        if not model.backbone.classifiers:
            raise ModelError(f"no linear layer makes the logits of {type(model.backbone.module).__name__}; use center")

    def update_and_predict(self, images: Tensor) -> Tensor:
        logits = self.in_parts(self.model.logits, images)
        if torch.isfinite(mean := logits.mean(0)).all():
            count = self.buffers.get(_COUNT, torch.tensor(0)) + len(logits)
            share = len(logits) / int(count) if self.config.alpha is None else self.config.alpha
            known = self.buffers.get(_MEAN, self._bias)  # the logits of features 0
            self.buffers = {_COUNT: count, _MEAN: known.lerp(mean, share)}
            self.model.weights.commit()
        return self._centered(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self._centered(self.model.logits(images))

    def _centered(self, logits: Tensor) -> Tensor:
        return logits - self.buffers[_MEAN] + self._bias if _MEAN in self.buffers else logits

    @property
    def _bias(self) -> Tensor:
        """The classifier's bias (C,), the mean of two in a distilled model, or zeros."""
        biases = [self.model.backbone.module.get_parameter(name).detach() for name in self.model.biases]
        zeros = torch.zeros(1, self.model.num_classes, device=self.model.device, dtype=torch.float32)
        return torch.stack(biases).mean(0) if biases else zeros[0]
