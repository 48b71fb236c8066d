"""No adaptation: the baseline every method is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from remtta.methods.base import DELTA, MethodBase
from remtta.methods.settings import MethodConfig


class Source(MethodBase):
    """Predict with the weights as they are; works with any classifier.

    Args:
        model: A classifier, put in eval mode and frozen.
        config: Only its precision is used.
    """

    num_forwards = 1.0
    num_backwards = 0.0
    num_trained = 0

    def __init__(self, model: nn.Module, config: MethodConfig | None = None) -> None:
        super().__init__(model, model, {}, (config or MethodConfig()).precision)

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, C) of preprocessed images (B, 3, H, W)."""
        logits = self.predict(images)
        self._last_views = logits.unsqueeze(0)
        return logits

    def answer(self, images: Tensor) -> Tensor:
        """The same as a call."""
        return self(images)

    def learn(self, labels: Tensor | None = None) -> None:
        """Nothing: it learns nothing."""

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """The same."""
        with self._context(images.device):
            logits: Tensor = self.model(images)
        return logits.float()

    @torch.no_grad()
    def predict_source(self, images: Tensor) -> Tensor:
        """The model's own logits, without any delta."""
        with self._weights.at_source():
            return Source.predict(self, images)

    def reset(self) -> None:
        """Back to the weights without any delta."""
        self._weights.reset()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Predict with source plus delta.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        self._weights.load(delta, num_updates)

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Nothing: it learns nothing."""
        return {}

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Nothing to use."""

    def state(self) -> dict[str, Tensor]:
        """The delta it was started from and its updates."""
        delta = {DELTA + name: tensor for name, tensor in self.delta().items()}
        return {**delta, "updates": torch.tensor(self.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        delta = {name.removeprefix(DELTA): tensor for name, tensor in state.items() if name.startswith(DELTA)}
        self.load_delta(delta, int(state["updates"]))
