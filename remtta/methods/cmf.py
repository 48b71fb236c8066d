"""CMF: ROID with a filtered copy of the weights (Lee and Chang, ICLR 2024, openreview.net/forum?id=BllUWdpIOA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from remtta.methods.roid import ROID, ROIDConfig
from remtta.methods.settings.base import ProperShare, Share

_HIDDEN = "hidden."
_VARIANCE = "hidden_variance"
_PARAMETERS = 38_400  # number for which the published process noise is meant


@dataclass(frozen=True)
class CMFConfig(ROIDConfig):
    """Settings of CMF: those of ROID, and of the hidden weights, which the adapted weights are observations of.

    Attributes:
        source_momentum: Share of the hidden weights kept at each step; the rest comes from the source weights.
        hidden_momentum: Share of the adapted weights kept after each step; the rest comes from the hidden weights.
        process_noise: Growth of the hidden weights' variance per step, for the 38,400 norm parameters of a ViT-B/16;
            scaled by their number.
        least_kept: Minimum share of the hidden weights kept after an observation.
    """

    hidden_momentum: Share = 0.99
    process_noise: ProperShare = 0.005
    least_kept: Share = 0.89


class CMF(ROID):
    """ROID with hidden weights, in place of the source weights, mixed back in.

    A Kalman filter tracks the hidden weights: they drift towards the source and are observed through the adapted ones.
    Only the adapted parameters have copies.
    """

    settings = CMFConfig
    config: CMFConfig

    def reset_buffers(self) -> None:
        super().reset_buffers()
        self.buffers |= {_HIDDEN + name: tensor.clone() for name, tensor in self.model.weights.source.items()}
        self.buffers[_VARIANCE] = torch.zeros((), dtype=torch.float64)

    @torch.no_grad()
    def after_step(self) -> None:
        drift, noise = self.config.source_momentum, self.config.process_noise * self.num_trained / _PARAMETERS
        predicted = drift**2 * float(self.buffers[_VARIANCE]) + noise
        kept = max((1 - noise) / (predicted + 1 - noise), self.config.least_kept)
        self.buffers[_VARIANCE].fill_(kept * predicted)
        source = self.model.weights.source
        for name, parameter in self.model.weights.parameters.items():
            hidden = self.buffers[_HIDDEN + name]
            hidden.lerp_(source[name], 1 - drift)
            hidden.lerp_(parameter, 1 - kept)
            parameter.lerp_(hidden, 1 - self.config.hidden_momentum)
