"""No adaptation: the baseline every method is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.config import REMConfig
from remtta.weights import AdaptedWeights, Committed


class Source:
    """Predict with the weights as they are; works with any classifier.

    Args:
        model: A classifier, put in eval mode and frozen.
        config: Only its precision is used.
    """

    adapts = False
    adapted_names: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, config: REMConfig | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self._precision = (config or REMConfig()).precision
        self._weights = AdaptedWeights({}, dict(model.named_parameters()))

    @property
    def num_updates(self) -> int:
        """Updates behind the delta it was started from."""
        return self.committed[1]

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""
        return self._weights.committed

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, C) of preprocessed images (B, 3, H, W)."""
        bf16 = self._precision == "bf16"
        with torch.autocast(images.device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits: Tensor = self.model(images)
        return logits.float()

    def reset(self) -> None:
        """Back to the weights without any delta."""
        self._weights.reset()

    def delta(self) -> dict[str, Tensor]:
        """The delta it was started from, if any."""
        return self._weights.delta()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Predict with source plus delta.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        self._weights.load(delta, num_updates)
