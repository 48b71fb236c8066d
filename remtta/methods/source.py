"""No adaptation: the baseline every method is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from remtta.methods.objective import Config, Descent, Objective, Targets
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, MethodConfig


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "micro_batch")


class Source(Objective[Config]):
    """Predict with the weights as they are; works with any classifier. Of the config, only precision is used."""

    settings: ClassVar[type[MethodConfig]] = SourceConfig
    chosen = "none"
    any_model = True
    is_source = True
    predicts_after = True
    adapts = False

    @torch.no_grad()
    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        return self.predict(images).unsqueeze(0)

    def passes(self) -> tuple[float, float]:
        return 1.0, 0.0

    def state(self) -> dict[str, Tensor]:
        return {}  # not even random numbers

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass
