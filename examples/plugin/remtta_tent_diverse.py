"""A method for remtta in its own package: Tent that also keeps its predictions diverse."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from remtta.baselines.losses import running_mean
from remtta.methods.base import Center, LossOutput
from remtta.methods.settings.base import Positive, Preset
from remtta.methods.tent import Tent, TentConfig


@dataclass(frozen=True)
class TentDiverseConfig(TentConfig):
    """Settings of TentDiverse.

    Attributes:
        diversity: Weight of the entropy of the mean prediction.
    """

    diversity: Positive = 1.0
    unused = ("micro_batch",)  # the mean is that of a whole batch


class TentDiverse(Tent):
    """Minimise the entropy of predictions, and maximise that of their running mean (Liang et al., ICML 2020)."""

    settings = TentDiverseConfig
    preset = Preset({"anchor": 0.01}, action="rollback", answer="both")  # guarded, as `remtta` is
    config: TentDiverseConfig

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        views, entropy, count = super().loss(images, center)
        mean = self._mean(views[0].softmax(-1)).clamp_min(1e-12)  # its logarithm has a gradient
        return LossOutput(views, entropy + self.config.diversity * (mean * mean.log()).sum(), count)

    def after_batch(self, views: Tensor) -> bool:
        self.buffers["mean"] = self._mean(views[0].softmax(-1))  # saved with the run's state
        return False

    def _mean(self, probs: Tensor) -> Tensor:
        return running_mean(self.buffers.get("mean"), probs, momentum=0.9)
