"""Learn from every N-th batch only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.observer import Observer
from remtta.methods.method import Method

BETWEEN_UPDATES = "between updates"
"""Reason why a frame is not learned from."""

_BATCHES = "batches"


def pace_of(method: Method) -> EveryNth | None:
    """Return the pace of a method, or None if every batch is learned from; raise UsageError if the method's updates do
    not last beyond their batch.
    """
    every = method.objective.config.adapt_every
    if every == 1:
        return None
    if not method.persists:
        raise UsageError(
            f"with adapt_every={every}, updates must last to the next batch, and these do not (a method without "
            "training, or episodic); use adapt_every=1"
        )
    return EveryNth(every)


class EveryNth(Observer):
    """Limits learning to every N-th batch, N >= 2."""

    prefix = "pace."

    def __init__(self, every: int) -> None:
        self._every = every
        self._batches = 0  # since the start, or since the source weights came back

    def before(self) -> str | None:
        """Return why the next batch is excluded from learning; None for every N-th batch, from the first on."""
        self._batches += 1
        return None if self._batches % self._every == 1 else BETWEEN_UPDATES

    def reset(self) -> None:
        """Learn from the next batch, as the source weights are back."""
        self._batches = 0

    def state(self) -> dict[str, Tensor]:
        """Return how many batches there were."""
        return {_BATCHES: torch.tensor(self._batches)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._batches = int(state[_BATCHES])
