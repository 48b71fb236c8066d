"""Adaptation methods. Each one predicts a batch, then learns from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from remtta.config import REMConfig
from remtta.errors import UsageError
from remtta.methods.rem import REM
from remtta.methods.source import Source
from remtta.weights import Committed


class Method(Protocol):
    """What `adapt_stream` asks of a method."""

    @property
    def adapts(self) -> bool:
        """Whether a batch changes the weights."""

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the parameters that adapt."""

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the current weights have seen."""

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""

    def __call__(self, images: Tensor) -> Tensor:
        """Predict logits (B, C) for preprocessed images (B, 3, H, W), then adapt."""

    def reset(self) -> None:
        """Back to the source weights, exactly."""

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source, by parameter name."""

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta."""


METHODS: dict[str, Callable[[nn.Module, REMConfig], Method]] = {"rem": REM, "source": Source}
"""Every method by its name on the command line."""


def build_method(name: str, model: nn.Module, config: REMConfig) -> Method:
    """Set up a method on a model.

    Raises:
        UsageError: If there is no such method, or its settings do not suit the model.
        ModelError: If the method cannot adapt the model.
    """
    if name not in METHODS:
        raise UsageError(f'unknown method "{name}"; choose {", ".join(METHODS)}')
    try:
        return METHODS[name](model, config)
    except ValueError as error:  # such as a mask ratio that leaves no patch of this model
        raise UsageError(str(error)) from error
