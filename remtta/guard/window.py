"""The last frames, as predicted by the source and the adapted model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_LEAST = torch.finfo(torch.float16).min


class Window:
    """Log-probabilities of the last frames by both models, and the source model's classes of more of them.

    Args:
        size: Number of frames whose log-probabilities are kept, in half precision.
        memory: Number of frames whose classes are kept.
    """

    def __init__(self, size: int, memory: int) -> None:
        self._size, self._memory = size, memory
        self.source = torch.empty(0, 0, dtype=torch.float16)
        self.adapted = torch.empty(0, 0, dtype=torch.float16)
        self.votes = torch.empty(0, dtype=torch.int32)

    def __len__(self) -> int:
        return len(self.source)

    def add(self, source: Tensor, adapted: Tensor) -> None:
        """Add frames by both models' logits (B, C), and drop the oldest."""
        self.votes = torch.cat([self.votes, source.argmax(1).to("cpu", torch.int32)])[-self._memory :]
        self.source, self.adapted = (
            torch.cat([kept if len(kept) else new[:0], new])[-self._size :]
            for kept, new in ((self.source, _compact(source)), (self.adapted, _compact(adapted)))
        )

    def back_to_source(self) -> None:
        """Replace the adapted model's predictions by the source model's, after a reset."""
        self.adapted = self.source.clone()

    def state(self) -> dict[str, Tensor]:
        """Return everything it holds."""
        return {"source": self.source, "adapted": self.adapted, "votes": self.votes}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.source, self.adapted, self.votes = (state[name].clone() for name in ("source", "adapted", "votes"))


def _compact(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).clamp(min=_LEAST).to("cpu", torch.float16)
