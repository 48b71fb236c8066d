"""Exponentially weighted running means."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_TINY = 1e-9  # bound on divisors


class RunningMean:
    """An exponentially weighted mean over images, whose weights are halved after `half_life` further images.

    Attributes:
        weight: The sum of the images' weights, the last of which is 1.
    """

    def __init__(self, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self.weight = 0.0
        self._sums: list[Tensor] = []

    def add(self, *values: Tensor) -> list[Tensor]:
        """Add a batch's values (B, ...), of one or more quantities; return the mean of each."""
        count, keep = len(values[0]), self._keep
        weights = keep ** torch.arange(count - 1, -1, -1, device=values[0].device, dtype=values[0].dtype)
        self.weight = keep**count * self.weight + (1 - keep**count) / (1 - keep)
        sums = self._sums or [torch.zeros_like(value[0]) for value in values]
        self._sums = [keep**count * total + weights @ value for total, value in zip(sums, values, strict=True)]
        return self.values

    @property
    def values(self) -> list[Tensor]:
        """The mean of each quantity; none before the first image."""
        return [total / max(self.weight, _TINY) for total in self._sums]

    @property
    def inverse_ess(self) -> float:
        """Inverse effective sample size: probability that two draws by the weights are the same image."""
        return (2 / self.weight - (1 - self._keep)) / (1 + self._keep)

    def state_dict(self) -> dict[str, Tensor]:
        """Return weight and sums."""
        sums = {str(number): total for number, total in enumerate(self._sums)}
        return {"weight": torch.tensor(self.weight, dtype=torch.float64), **sums}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what `state_dict` returned."""
        self.weight = float(state["weight"])
        self._sums = [state[str(number)].to(device) for number in range(len(state) - 1)]
