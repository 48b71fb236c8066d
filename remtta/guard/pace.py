"""Learn from every N-th batch only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.guard.observer import Observer
from remtta.methods.method import Method

BETWEEN_UPDATES = "between updates"
"""Why a frame is not learned from."""

_BATCHES = "pace.batches"


def pace_of(method: Method) -> EveryNth | None:
    """Return what leaves updates of a method out, if its settings ask for that.

    Raises:
        UsageError: If the method keeps nothing of an update for the batches that have none.
    """
    every = method.objective.config.adapt_every
    if every == 1:
        return None
    if not method.lasts:
        raise UsageError(
            "--adapt-every leaves updates out, and this method has none, or none that lasts to the next batch; "
            "leave the option out, or choose another method"
        )
    return EveryNth(every)


class EveryNth(Observer):
    """Leaves all batches but every N-th out of learning.

    Args:
        every: N, at least 2.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._batches = 0  # since the start, or since the source weights came back

    def before(self, images: Tensor) -> str | None:
        """Return why the next images are not to be learned from; None for every N-th batch, from the first on."""
        self._batches += 1
        return None if self._batches % self._every == 1 else BETWEEN_UPDATES

    def reset(self) -> None:
        """Learn from the next batch: the source weights are back."""
        self._batches = 0

    def state(self) -> dict[str, Tensor]:
        """Return how many batches there were."""
        return {_BATCHES: torch.tensor(self._batches)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._batches = int(state[_BATCHES])
