"""Methods that train nothing: the source model unchanged, or with centered logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from remtta.methods.base import Center, Config, Method
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, BatchNorms, MethodConfig


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "center", "micro_batch")


@dataclass(frozen=True)
class CenterConfig(MethodConfig):
    """Settings of centered logits alone; of the shared ones episodic, those of batch norms and precision are used."""

    center: bool = True
    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, "micro_batch", "center")


class Source(Method[Config]):
    """Predict with the source weights; works with any classifier."""

    settings: ClassVar[type[MethodConfig]] = SourceConfig
    trains = "none"
    calls_module = True
    adapts = False
    passes_per_step = 1, 0
    _counts = False  # whether the last batch changes recent statistics

    def predict(self, images: Tensor, *, learn: bool = False, counted: bool = True, latency: bool = False) -> Tensor:
        logits = super().predict(images, counted=counted)
        self._counts = learn and self.adapts and bool(torch.isfinite(logits).all())
        return logits

    def step(self, center: Center, labels: Tensor | None = None) -> bool:
        if self._counts:
            self._counts = False
            self.model.batch_norms.set_running_statistics()
            self.model.weights.commit()
        return False

    def extra_state(self) -> dict[str, Tensor]:
        return {}  # no random numbers either

    def load_extra_state(self, state: object) -> None:
        pass


class CenteredSource(Source[Config]):
    """Predict with the source weights, and remove the common component of the logits: one forward pass.

    Related to NEO, which centers the features of a domain (arXiv:2510.05635); see `remtta.pipeline.centering`.
    """

    settings: ClassVar[type[MethodConfig]] = CenterConfig
    adapts = True
