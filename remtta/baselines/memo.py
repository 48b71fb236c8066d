"""MEMO: marginal entropy minimisation with one test point (Zhang et al., NeurIPS 2022, arXiv:2110.09506)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.baselines.augmentations import augmix
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.losses import log_mean_probs, marginal_entropy
from remtta.methods.settings.base import Count, FixedBatchNorms, NoNormsConfig, Positive


@dataclass(frozen=True)
class MEMOConfig(NoNormsConfig):
    """Settings of MEMO; the learning rate is the paper's for transformers, without its weight decay.

    With `micro_batch`, that many views go through the model at a time; each then takes two forward passes, since the
    mean over all views comes first.

    Attributes:
        num_augmentations: Number of augmented views of each image.
    """

    num_augmentations: Count = 64
    bn: FixedBatchNorms = "running"  # the views are of one image
    lr: Positive = 1e-5
    unused = (*NoNormsConfig.unused, "prediction_step", "center")


class MEMO(Method[MEMOConfig]):
    """Adapt to each image alone, predict it with the adapted weights, and restore the weights.

    The loss is the entropy of the mean prediction over augmented views of the image. Images do not influence one
    another, so the batch size makes no difference. `num_updates` counts the images adapted to, although the weights
    keep nothing of them. Views are AugMix at severity 1, of the preprocessed image.
    """

    settings = MEMOConfig
    trains = "all"
    persistent_updates = False
    predicts_after_update = True
    num_models = 2  # the adapted model, and the weights to restore
    delta_refusal = "MEMO puts its weights back after every image"

    def __init__(self, model: AdaptedModel, config: MEMOConfig) -> None:
        super().__init__(model, config)
        self._split = config.micro_batch is not None and config.micro_batch < config.num_augmentations

    def passes(self) -> tuple[float, float]:
        """Return the passes: each view forward, twice in micro-batches, and the prediction; each view backward."""
        views = self.config.steps * self.config.num_augmentations
        return views * (1 + self._split) + 1, views

    def update_and_predict(self, images: Tensor) -> Tensor:
        weights = self.model.weights
        start = weights.copy()
        logits = []
        for image in images:
            try:
                predicted, adapted = self._predict_adapted(image)
            finally:
                weights.put(start.items())
                self.optimizer.zero_grad()
                self.optimizer.restart()
            logits.append(predicted)
            if adapted:
                weights.commit()  # counts the update
        return torch.stack(logits)

    def _predict_adapted(self, image: Tensor) -> tuple[Tensor, bool]:
        """Return one image's logits (C,) from after the update, and whether there was an update."""
        adapted = self.optimizer.take_steps(lambda: self._backward(self._views(image)), self.config.steps)
        return self.forward(image.unsqueeze(0)).squeeze(0), adapted

    def _views(self, image: Tensor) -> Tensor:
        drawn = range(self.config.num_augmentations)
        return torch.stack([self.model.pixels.augment(image, augmix, self.model.generator) for _ in drawn])

    def _backward(self, views: Tensor) -> None:
        """Accumulate gradients of the marginal entropy of views (V, 3, H, W)."""
        if not self._split:
            self.model.backward(marginal_entropy(self.model.check_gradients(self.model.logits(views))))
            return
        parts = views.split(self.config.micro_batch or len(views))
        with torch.no_grad():
            log_mean = log_mean_probs(torch.cat([self.model.logits(part) for part in parts]))
        for part in parts:  # dH / dp of the mean is -(log p + 1), and each view contributes 1 / V to the mean
            probs = self.model.check_gradients(self.model.logits(part)).softmax(-1)
            self.model.backward((-(log_mean + 1) * probs).sum().div(len(views)))
