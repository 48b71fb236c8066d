"""SAR: entropy minimisation towards flat minima (Niu et al., ICLR 2023, arXiv:2302.12400)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy
from remtta.methods.settings import SARConfig

_LOSS = "mean_loss"

_log = logging.getLogger("remtta")


class SAR(GradientMethod):
    """Predict a batch, then lower the entropy of its certain images where the loss is worst nearby.

    The gradient is taken a step of length rho up the loss, from the images that
    are certain both here and there. When the running mean of that loss falls
    under a limit the model counts as collapsed: it goes back to the source
    weights, and the running mean starts anew.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    _entropy = staticmethod(entropy)

    def __init__(self, model: nn.Module, config: SARConfig | None = None) -> None:
        self.config = config or SARConfig()
        super().__init__(model, self.config)
        self._margin = self.config.entropy_margin * math.log(self._backbone.num_classes)
        self._mean_loss: float | None = None

    @property
    def num_forwards(self) -> float:
        """Forward passes per image, at most: the second is only for certain ones."""
        return 2 * self.config.steps

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        logits = self._logits(images)
        entropies = self._entropy(logits)
        certain = entropies < self._margin
        if labels is not None:  # which images were certain before the climb
            certain = certain & labels
        return logits.unsqueeze(0), entropies[certain].mean(), int(certain.sum())

    def _gradients(self, images: Tensor, labels: Tensor | None) -> Tensor:
        views = super()._gradients(images, labels)
        certain = self._entropy(views[0]) < self._margin
        if certain.any():
            with _climbed(self._weights.parameters.values(), self.config.rho):
                above = self._gradients_above(images, certain)
            self._note_loss(self._entropy(above[0]))
        return views

    def _gradients_above(self, images: Tensor, certain: Tensor) -> Tensor:
        """Leave the gradients of the certain images (B,) of a batch in the parameters; returns the views of these."""
        if not self._batch_norms.mixes:
            return super()._gradients(images[certain], None)
        self._answered_targets = certain  # the others belong to the batch
        return super()._gradients(images, None)[:, certain]

    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor | None:
        return None

    def _note_loss(self, entropies: Tensor) -> None:
        certain = entropies[entropies < self._margin]
        if len(certain):
            loss, momentum = float(certain.mean()), self.config.loss_momentum
            self._mean_loss = loss if self._mean_loss is None else momentum * self._mean_loss + (1 - momentum) * loss

    def _after_batch(self, views: Tensor) -> None:
        if self._mean_loss is not None and self._mean_loss < self.config.reset_below:
            _log.info("the running loss fell to %.3f nats: back to the source weights", self._mean_loss)
            self.reset()

    def _own_state(self) -> dict[str, Tensor]:
        return {} if self._mean_loss is None else {_LOSS: torch.tensor(self._mean_loss, dtype=torch.float64)}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        if _LOSS in state:
            self._mean_loss = float(state[_LOSS])

    def _forget(self) -> None:
        self._mean_loss = None


@contextlib.contextmanager
def _climbed(parameters: Iterable[nn.Parameter], length: float) -> Iterator[None]:
    """Parameters a step of this length up their gradient, within the block; afterwards the same bits as before."""
    moving = [parameter for parameter in parameters if parameter.grad is not None]
    before = [parameter.detach().clone() for parameter in moving]
    gradients = [parameter.grad for parameter in moving if parameter.grad is not None]
    scale = length / (nn.utils.get_total_norm(gradients) + 1e-12)
    try:
        with torch.no_grad():
            for parameter, gradient in zip(moving, gradients, strict=True):
                parameter.add_(gradient * scale)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moving, before, strict=True):
                parameter.copy_(value)
