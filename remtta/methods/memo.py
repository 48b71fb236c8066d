"""MEMO: marginal entropy minimisation with one test point (Zhang et al., NeurIPS 2022, arXiv:2110.09506)."""

from __future__ import annotations

import logging
import math
from functools import partial

import torch
from torch import Tensor, nn

from remtta.methods.augmentations import PixelSpace
from remtta.methods.augmix import augmix
from remtta.methods.gradient import GradientMethod
from remtta.methods.settings import MEMOConfig
from remtta.methods.settings.whole_model import Border

_log = logging.getLogger("remtta")

_HALF = 128 / 255
_BORDERS: dict[Border, tuple[float, float, float]] = {
    "red": (_HALF, 0.0, 0.0),
    "grey": (_HALF, _HALF, _HALF),
    "black": (0.0, 0.0, 0.0),
}


class MEMO(GradientMethod):
    """Adapt to each image alone, predict it with the adapted weights, and put the weights back.

    The loss is the entropy of the mean prediction over augmented views of the
    image. Images do not see one another (but for `keep_optimizer`, which hands
    the optimizer's memory on), so the batch size changes nothing.
    `num_updates` counts the images adapted to; the weights keep none of them.
    The views are AugMix at severity 1, of the preprocessed image.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default the paper's for transformers.
    """

    norms_only = False
    accumulates = False
    num_models = 2  # the adapting one, and the weights to go back to
    delta_refusal = "MEMO puts its weights back after every image"

    def __init__(self, model: nn.Module, config: MEMOConfig | None = None) -> None:
        self.config = config or MEMOConfig()
        super().__init__(model, self.config)
        self._pixels = PixelSpace(self._backbone.module)
        self._augmentation = partial(augmix, border=_BORDERS[self.config.border])

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: each view, twice if not all fit into a micro-batch, and the prediction."""
        return self.config.steps * self.config.num_augmentations * (1 + self._split) + 1

    @property
    def num_backwards(self) -> float:
        """Backward passes per image: one per view."""
        return self.config.steps * self.config.num_augmentations

    @property
    def _split(self) -> bool:
        return self.config.micro_batch is not None and self.config.micro_batch < self.config.num_augmentations

    def _chosen(self) -> dict[str, nn.Parameter]:
        return dict(self._backbone.module.named_parameters())

    def answer(self, images: Tensor) -> Tensor:
        """The same as a call: the prediction comes from after the update."""
        return self(images)

    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        start = {name: parameter.detach().clone() for name, parameter in self._weights.parameters.items()}
        logits = []
        for image in images:
            try:
                predicted, adapted = self._predict_adapted(image)
            finally:
                self._put_back(start)
            logits.append(predicted)
            if adapted:
                self._weights.commit()  # counts the update
        return torch.stack(logits).unsqueeze(0)

    @torch.no_grad()
    def _put_back(self, start: dict[str, Tensor]) -> None:
        self._optimizer.zero_grad()
        if not self.config.keep_optimizer:
            self._optimizer.restart()
        for name, parameter in self._weights.parameters.items():
            parameter.copy_(start[name])

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _predict_adapted(self, image: Tensor) -> tuple[Tensor, bool]:
        """Logits (C,) of one image from after the update, and whether there was one."""
        adapted = False
        image = image.clone() if image.is_inference() else image  # which no graph may hold
        for _ in range(self.config.steps):
            self._optimizer.zero_grad()
            augmented = (
                self._pixels.augment(image, self._augmentation, self._generator)
                for _ in range(self.config.num_augmentations)
            )
            self._backward(torch.stack(list(augmented)))
            if not self._optimizer.finite():
                _log.warning("an image gave gradients that are not finite numbers, and was not adapted to")
                break
            self._optimizer.step()
            adapted = True
        return self.predict(image.unsqueeze(0)).squeeze(0), adapted

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)  # of the views of one image
        return logits.unsqueeze(0), marginal_entropy(logits), len(images)

    def _backward(self, views: Tensor) -> None:
        """Gradients of the marginal entropy of views (V, 3, H, W)."""
        if not self._split:
            self._loss(views, None)[1].backward()
            return
        parts = views.split(self.config.micro_batch or len(views))
        with torch.no_grad():
            log_mean = log_mean_probs(torch.cat([self._logits(part) for part in parts]))
        for part in parts:  # dH / dp of the mean is -(log p + 1), and each view's share in the mean is 1 / V
            probs = self._logits(part).softmax(-1)
            (-(log_mean + 1) * probs).sum().div(len(views)).backward()


def log_mean_probs(logits: Tensor) -> Tensor:
    """Logarithm (C,) of the mean prediction of views (V, C)."""
    return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits))


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy of the mean prediction of views (V, C): a scalar, in nats."""
    log_mean = log_mean_probs(logits)
    return -(log_mean.exp() * log_mean).sum()
