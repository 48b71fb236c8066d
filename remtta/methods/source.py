"""The source weights as they are: the baseline every method is compared with, and the same with centred logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from remtta.errors import check
from remtta.methods.objective import Config, Descent, Objective, Targets
from remtta.methods.settings.base import BATCH_NORM_SETTINGS, UPDATE_SETTINGS, MethodConfig


@dataclass(frozen=True)
class SourceConfig(MethodConfig):
    """Settings of the method that adapts nothing: only precision is used."""

    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "episodic", "centre", "micro_batch")


@dataclass(frozen=True)
class CentreConfig(MethodConfig):
    """Settings of centred logits alone: of the shared ones only episodic and precision are used."""

    centre: bool = True
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "micro_batch")

    def __post_init__(self) -> None:
        check(self.centre, "centre", self.centre, "true: without it this is the method source")
        super().__post_init__()


class Source(Objective[Config]):
    """Predict with the weights as they are; works with any classifier. Of the config, only precision is used."""

    settings: ClassVar[type[MethodConfig]] = SourceConfig
    chosen = "none"
    only_predicts = True
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


class CentredSource(Objective[Config]):
    """Predict with the source weights and take out of the logits what they have in common: one forward pass.

    Kin to NEO, which centres the features of a domain (arXiv:2510.05635); see `remtta.methods.centring`.
    """

    settings: ClassVar[type[MethodConfig]] = CentreConfig
    chosen = "none"
    only_predicts = True
    predicts_after = True

    @torch.no_grad()
    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        logits = self.predict(images)
        self.net.weights.commit()
        return logits.unsqueeze(0)

    def passes(self) -> tuple[float, float]:
        return 1.0, 0.0
