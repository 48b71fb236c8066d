"""SAR: entropy minimisation towards flat minima (Niu et al., ICLR 2023, arXiv:2302.12400)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from remtta.methods.base import Center, LossOutput, Method
from remtta.methods.losses import entropy
from remtta.methods.settings.base import BelowOne, MethodConfig, NonNegative, Optimizer, Positive
from remtta.models.weights import AdaptedWeights

_LOSS = "mean_loss"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SARLikeConfig(MethodConfig):
    """SGD as in SAR's official code for ViTs: a learning rate of 1e-3 at a batch of 64, doubled at a batch of 1."""

    optimizer: Optimizer = "sgd"
    lr_batch = 64

    @classmethod
    def lr_at(cls, batch_size: int) -> float:
        """Return a learning rate proportional to the batch size, but doubled for single images."""
        return (2 if batch_size == 1 else 1) * super().lr_at(batch_size)


@dataclass(frozen=True)
class SARConfig(SARLikeConfig):
    """Settings of SAR; the defaults are the official code's for ViTs.

    Attributes:
        entropy_margin: Learn only from images with lower entropy; a fraction of ln C.
        rho: Length of the step up the loss after which the gradient is taken.
        reset_below: Running mean of the loss, in nats, below which the model counts as collapsed and the source weights
            are restored.
        loss_momentum: Share of that running mean kept at each update.
    """

    entropy_margin: Positive = 0.4
    rho: Positive = 0.05
    reset_below: NonNegative = 0.2
    loss_momentum: BelowOne = 0.9


class SAR(Method[SARConfig]):
    """Predict a batch, then minimise the entropy of confident images at the worst nearby weights.

    The gradient is taken after a step of length rho up the loss, from the images that are confident both before and
    after that step. When the running mean of that loss falls below a limit, the model counts as collapsed: the source
    weights are restored, and the running mean restarts.
    """

    settings = SARConfig
    passes_per_step = 2, 2
    entropy = staticmethod(entropy)

    @property
    def _margin(self) -> float:
        return self.config.entropy_margin * self.log_classes

    def loss(self, images: Tensor, center: Center, *certain_before: Tensor) -> LossOutput:
        logits = center(self.logits(images))
        entropies = self.entropy(logits)
        certain = entropies < self._margin
        for before in certain_before:  # images that were confident before the step up
            certain = certain & before
        return LossOutput(logits.unsqueeze(0), entropies[certain].mean(), int(certain.sum()))

    def compute_gradients(self, images: Tensor, center: Center, *targets: Tensor) -> Tensor:
        views = super().compute_gradients(images, center)
        certain = self.entropy(views[0]) < self._margin
        if certain.any():
            with _climbed(self.model.weights, self.config.rho):
                if self.model.batch_norms.mixes:  # batch statistics need the other images
                    above = super().compute_gradients(images, center, certain)[:, certain]
                else:
                    above = super().compute_gradients(images[certain], center)
            self._note_loss(self.entropy(above[0]))
        return views

    def _note_loss(self, entropies: Tensor) -> None:
        certain = entropies[entropies < self._margin]
        if len(certain):
            loss, momentum = certain.mean().cpu().double(), self.config.loss_momentum
            known = self.buffers.get(_LOSS)
            self.buffers[_LOSS] = loss if known is None else momentum * known + (1 - momentum) * loss

    def after_batch(self, views: Tensor) -> bool:
        loss = self.buffers.get(_LOSS)
        collapsed = loss is not None and float(loss) < self.config.reset_below
        if collapsed:
            _log.info("the running loss fell to %.3f nats: back to the source weights", loss)
        return collapsed


@contextlib.contextmanager
def _climbed(weights: AdaptedWeights, length: float) -> Iterator[None]:
    """Move weights a step of this length up their gradient within the block; restore the same bits afterwards."""
    moving = [(parameter, parameter.grad) for parameter in weights.parameters.values() if parameter.grad is not None]
    before, scale = weights.copy(), length / (nn.utils.get_total_norm([each for _, each in moving]) + 1e-12)
    try:
        with torch.no_grad():
            for parameter, gradient in moving:
                parameter.add_(gradient * scale)
        yield
    finally:
        weights.put(before.items())
