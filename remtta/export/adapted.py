"""The adapted model to export, and the check that an export gives the same logits."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from remtta._version import __version__
from remtta.deltas.delta import Delta, apply_delta
from remtta.errors import RemttaError, counted
from remtta.models.card import ModelCard, card_of
from remtta.models.huggingface import weights_place
from remtta.models.loading import load
from remtta.options import ModelOptions

TOLERANCE = 1e-4
"""Largest difference of a logit from torch's, relative to the largest logit if that exceeds 1."""

BATCHES = (1, 7)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportableModel:
    """A model with a delta added."""

    model: nn.Module  # on the CPU, in float32
    base: Mapping[str, Tensor]  # the source weights
    card: ModelCard  # the adapted model's
    delta: Delta
    inputs: Sequence[str | Path | None]  # files or folders of base and delta, if known

    @property
    def facts(self) -> dict[str, str]:
        """Origin and usage, as strings."""
        return {
            "remtta_version": __version__,
            "model": self.delta.model,
            "base_sha256": self.delta.base_sha256,
            "state_sha256": self.card.sha256,
            "delta_sha256": self.delta.file_sha256 or "",
            "method": self.delta.method,
            "frames": str(self.delta.frames),
            "updates": str(self.delta.updates),
            "preprocessing": json.dumps(self.card.preprocessing.as_dict()),
            "labels": json.dumps(list(self.card.labels or [])),
        }

    def images(self, count: int) -> Tensor:
        """Return normalised random images, the same each time."""
        generator = torch.Generator().manual_seed(count)
        return torch.randn(count, 3, *self.card.preprocessing.input_size, generator=generator)

    @torch.inference_mode()
    def check(self, program: str, predict: Callable[[Tensor], ArrayLike]) -> None:
        """Compare another program's logits (B, C) of images (B, 3, H, W) with torch's, for batches of 1 and 7; raise
        RemttaError if a difference, relative to the largest logit if that exceeds 1, is larger than `TOLERANCE`.
        """
        differences = []
        for count in BATCHES:
            images = self.images(count)
            expected = self.model(images).numpy()
            got = np.asarray(predict(images))
            if got.shape != expected.shape:
                raise RemttaError(
                    f"{program} returns {tuple(got.shape)} for {counted(count, 'image')}, torch {tuple(expected.shape)}"
                )
            differences.append(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
        worst = float(np.max(differences))  # unlike max(), keeps a NaN
        if not worst <= TOLERANCE:
            raise RemttaError(f"in {program} the logits differ from torch's by {worst:.1e}; nothing was exported")
        _log.info("%s: logits within %.1e of torch's", program, worst)


def adapted_model(delta: Delta, options: ModelOptions) -> ExportableModel:
    """Load the base of a delta by the options that `base_options` returned, and add the delta; raise RemttaError if the
    base cannot be loaded, or the delta does not fit.
    """
    model = load(options)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_delta(model, delta)
    inputs = weights_place(options.name or "", options.checkpoint), delta.path, options.text_embeddings
    return ExportableModel(model, base, card_of(model), delta, inputs)
