"""CMF: ROID with a filtered copy of the weights (Lee and Chang, ICLR 2024, openreview.net/forum?id=BllUWdpIOA)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.roid import ROID
from remtta.methods.settings import CMFConfig

_HIDDEN = "hidden."
_VARIANCE = "hidden_variance"
_PARAMETERS = 38_400  # that the published process noise is meant for


class CMF(ROID):
    """ROID's loss, with hidden weights in place of the source weights that are mixed back in.

    A Kalman filter follows the hidden weights: they drift towards the source
    and are observed through the adapted ones. Only of the adapted parameters
    are there copies.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code for ViTs.
    """

    config: CMFConfig
    _hidden: dict[str, Tensor]
    _variance: float

    def __init__(self, model: nn.Module, config: CMFConfig | None = None) -> None:
        super().__init__(model, config or CMFConfig())

    @torch.no_grad()
    def _after_step(self) -> None:
        drift, noise = self.config.source_momentum, self._noise()
        predicted = drift**2 * self._variance + noise
        kept = max((1 - noise) / (predicted + 1 - noise), self.config.least_kept)
        self._variance = kept * predicted
        source = self._weights.source
        for name, parameter in self._weights.parameters.items():
            hidden = self._hidden[name]
            hidden.lerp_(source[name], 1 - drift)
            hidden.lerp_(parameter, 1 - kept)
            parameter.lerp_(hidden, 1 - self.config.hidden_momentum)

    def _noise(self) -> float:
        num_parameters = sum(parameter.numel() for parameter in self._weights.parameters.values())
        return self.config.process_noise * num_parameters / _PARAMETERS

    def _own_state(self) -> dict[str, Tensor]:
        hidden = {_HIDDEN + name: tensor for name, tensor in self._hidden.items()}
        variance = torch.tensor(self._variance, dtype=torch.float64)
        return {**super()._own_state(), **hidden, _VARIANCE: variance}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        super()._load_own_state(state)
        self._variance = float(state[_VARIANCE])
        for name, hidden in self._hidden.items():
            hidden.copy_(state[_HIDDEN + name])

    def _forget(self) -> None:
        super()._forget()
        self._hidden = {name: tensor.clone() for name, tensor in self._weights.source.items()}
        self._variance = 0.0
