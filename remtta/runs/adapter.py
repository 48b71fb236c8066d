"""A method, perhaps under the guard, as one thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from remtta.guard.guard import Guard
from remtta.methods.method import Method
from remtta.runs.states import take_back


class Adapter:
    """Predicts, learns and is put back; the guard, if there is one, has its say in each.

    Args:
        method: The method.
        guard: What watches it.
    """

    def __init__(self, method: Method, guard: Guard | None = None) -> None:
        self.method, self.guard = method, guard

    @property
    def learns(self) -> bool:
        """Whether a batch may still change anything."""
        return self.method.adapts and not self.retired

    @property
    def by_source(self) -> bool:
        """Whether the last prediction was the source model's, in place of the adapted one's."""
        return self.guard is not None and self.guard.from_source

    @property
    def retired(self) -> bool:
        """Whether the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.retired

    @property
    def ended(self) -> bool:
        """Whether the guard is to end the run now."""
        return self.guard is not None and self.guard.retired and self.guard.options.action == "stop"

    @property
    def total_alarms(self) -> int:
        """Alarms of the guard so far."""
        return self.guard.total_alarms if self.guard else 0

    def predict(
        self, pixels: Tensor, fit: Tensor | None = None, labels: Tensor | None = None, *, later: bool = False
    ) -> Tensor:
        """Predict all images, from before the update on those of them that are fit for one.

        The guard answers with the source for all or none.

        Args:
            pixels: Shape (B, 3, H, W), preprocessed.
            fit: Shape (B,), on the CPU: which images are learned from; None for all.
            labels: Shape (B,), for methods that learn from them.
            later: Only predict now; `learn` brings the update.

        Returns:
            Logits of shape (B, C).
        """
        if fit is None or fit.all():
            return self._step(pixels, labels, later=later)
        if not fit.any():
            return (self.guard or self.method).predict(pixels)
        others = self.method.predict(pixels[~fit])  # before the update; the guard decides after it
        logits = others.new_empty(len(fit), others.shape[1])
        logits[fit] = self._step(pixels[fit], None if labels is None else labels[fit], later=later).to(logits)
        if self.guard and self.guard.from_source:
            others = self.guard.method.predict_source(pixels[~fit])
        logits[~fit] = others
        return logits

    def _step(self, pixels: Tensor, labels: Tensor | None, *, later: bool) -> Tensor:
        step = self.guard or self.method
        if later:
            return step.answer(pixels)
        return step(pixels) if labels is None else step(pixels, labels)

    def learn(self) -> None:
        """Adapt to the images of the last `predict` with `later`."""
        (self.guard or self.method).learn()

    def reset(self) -> None:
        """Back to the source weights, exactly."""
        self.method.reset()
        if self.guard:
            self.guard.reset()

    def events(self) -> list[dict[str, Any]]:
        """What the guard decided since the last call."""
        return self.guard.events() if self.guard else []

    def state(self) -> dict[str, Tensor]:
        """Everything the next update and the next decision depend on."""
        return {**self.method.state(), **(self.guard.state() if self.guard else {})}

    def take_back(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that a file held.

        Raises:
            UsageError: If it is not one that this would save.
        """
        take_back(path, state, *([self.guard] if self.guard else []), self.method)
