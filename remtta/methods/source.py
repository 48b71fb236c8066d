"""No adaptation: the baseline every method is compared with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from remtta.methods.settings import MethodConfig
from remtta.models.precision import ForwardContext
from remtta.models.weights import AdaptedWeights, Committed


class Source:
    """Predict with the weights as they are; works with any classifier.

    Args:
        model: A classifier, put in eval mode and frozen.
        config: Only its precision is used.
    """

    adapts = False
    needs_labels = False
    needs_source = False
    most_source_images: int | None = None
    norms_only = True
    delta_refusal: str | None = None
    num_forwards = 1.0
    num_backwards = 0.0
    num_models = 1
    num_trained = 0
    adapted_names: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, config: MethodConfig | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self._context = ForwardContext(self.model, (config or MethodConfig()).precision)
        self._weights = AdaptedWeights({}, dict(model.named_parameters()))
        self._last_views: Tensor | None = None

    @property
    def num_updates(self) -> int:
        """Updates behind the delta it was started from."""
        return self.committed[1]

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""
        return self._weights.committed

    @property
    def last_views(self) -> Tensor | None:
        """The last batch's logits, as the only view (1, B, C)."""
        return self._last_views

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

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Nothing: it learns nothing."""
        return {}

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Nothing to use."""

    def state(self) -> dict[str, Tensor]:
        """The delta it was started from and its updates."""
        return {**self.delta(), "updates": torch.tensor(self.num_updates)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        delta = {name: tensor for name, tensor in state.items() if name != "updates"}
        self.load_delta(delta, int(state["updates"]))
