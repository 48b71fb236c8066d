"""RDumb: ETA that starts again from time to time (Press et al., NeurIPS 2023, arXiv:2306.05401)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.eta import ETA
from remtta.methods.settings import RDumbConfig

_STEPS = "steps"


class RDumb(ETA):
    """ETA, with weights, optimizer and running mean put back after every so many steps.

    Steps that no image passed the filters for count, too.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default the paper's.
    """

    config: RDumbConfig

    def __init__(self, model: nn.Module, config: RDumbConfig | None = None) -> None:
        super().__init__(model, config or RDumbConfig())
        self._num_steps = 0

    @torch.no_grad()
    def _after_batch(self, views: Tensor) -> None:
        super()._after_batch(views)
        self._num_steps += 1
        if self._num_steps >= self.config.reset_every_steps:
            self.reset()

    def _own_state(self) -> dict[str, Tensor]:
        return {**super()._own_state(), _STEPS: torch.tensor(self._num_steps)}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        super()._load_own_state(state)
        self._num_steps = int(state[_STEPS])

    def _forget(self) -> None:
        super()._forget()
        self._num_steps = 0
