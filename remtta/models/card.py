"""What a run needs to know of its model beside the model itself, read off once."""

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
    """A model in words and numbers.

    Attributes:
        origin: What `load_model` built it from; the name "unknown" for any other model.
        sha256: Hash of its whole state, the source weights.
        preprocessing: How images become its inputs.
        labels: One name per class, or None.
        num_classes: Classes of its head.
        device: Where it is.
    """

    origin: Mapping[str, Any]
    sha256: str
    preprocessing: Preprocessing
    labels: Sequence[str] | None
    num_classes: int
    device: torch.device

    @property
    def name(self) -> str:
        """What it is called in records and deltas."""
        return str(self.origin["name"])

    @property
    def options(self) -> dict[str, Any]:
        """What else than its name it takes to build it."""
        return {key: value for key, value in self.origin.items() if key != "name"}


def card_of(model: nn.Module, preprocessing: Preprocessing | None = None, sha256: str | None = None) -> ModelCard:
    """Read a model's card off it.

    Args:
        model: A classifier at its source weights.
        preprocessing: How images become its inputs; by default as it asks for.
        sha256: Hash of its state, where it is known; after its head was cut, that of the whole model.
    """
    return ModelCard(
        origin=origin_of(model),
        sha256=sha256 or state_sha256(model),
        preprocessing=preprocessing or preprocessing_of(model),
        labels=labels_of(model),
        num_classes=int(model.num_classes),  # type: ignore[arg-type]
        device=next(model.parameters()).device,
    )
