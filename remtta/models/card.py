"""A model in words and numbers, read off once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remtta.models.config import origin_of
from remtta.models.hashing import state_sha256
from remtta.models.labels import labels_of
from remtta.models.preprocessing import Preprocessing, preprocessing_of


@dataclass(frozen=True)
class ModelCard:
    """What a run needs to know of its model beside the model itself."""

    origin: Mapping[str, Any]  # what `load_model` built it from; the name "unknown" for any other model
    sha256: str  # of its whole state, the source weights
    preprocessing: Preprocessing
    labels: Sequence[str] | None
    num_classes: int
    device: torch.device

    @property
    def name(self) -> str:
        """Its name in records and deltas."""
        return str(self.origin["name"])

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `load_model` beside its name."""
        return {key: value for key, value in self.origin.items() if key != "name"}


def card_of(model: nn.Module, preprocessing: Preprocessing | None = None, sha256: str | None = None) -> ModelCard:
    """Read the card off a classifier at its source weights.

    By default the preprocessing is what it asks for. Where its head was cut, `sha256` is that of the whole model.
    """
    return ModelCard(
        origin=origin_of(model),
        sha256=sha256 or state_sha256(model),
        preprocessing=preprocessing or preprocessing_of(model),
        labels=labels_of(model),
        num_classes=int(model.num_classes),  # type: ignore[arg-type]
        device=next(model.parameters()).device,
    )
