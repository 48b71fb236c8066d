"""The source model unchanged, as the baseline of every method, and with centred logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from remtta.methods.objective import Config, Descent, Objective, Targets
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, BatchNorms, MethodConfig


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "centre", "micro_batch")


@dataclass(frozen=True)
class CentreConfig(MethodConfig):
    """Settings of centred logits alone; of the shared ones episodic, those of batch norms and precision are used."""

    centre: bool = True
    bn: BatchNorms = "running"
    unused = (*UPDATE_SETTINGS, "micro_batch", "centre")


class Source(Objective[Config]):
    """Predict with the source weights; works with any classifier."""

    settings: ClassVar[type[MethodConfig]] = SourceConfig
    chosen = "none"
    only_predicts = True
    predicts_after = True
    adapts = False
    passes_per_step = 1, 0

    @torch.no_grad()
    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        logits = self.predict(images)
        if self.adapts and torch.isfinite(logits).all():
            self.net.batch_norms.follow()
            self.net.weights.commit()
        return logits.unsqueeze(0)

    def state(self) -> dict[str, Tensor]:
        return {}  # no random numbers either

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class CentredSource(Source[Config]):
    """Predict with the source weights, and remove the common component of the logits: one forward pass.

    Related to NEO, which centres the features of a domain (arXiv:2510.05635); see `remtta.methods.centring`.
    """

    settings: ClassVar[type[MethodConfig]] = CentreConfig
    adapts = True
