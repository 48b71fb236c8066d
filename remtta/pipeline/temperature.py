"""Temperature scaling without labels: confidences of the ensemble that say how often it is right.

Two models of the same accuracy that err independently agree about as often as they are right, if their ensemble is
calibrated (Jiang et al., "Assessing Generalization of SGD via Disagreement", ICLR 2022, arXiv:2106.13799). So the
temperature is sought at which the mean confidence of the ensemble equals the rate at which the source and the adapted
model predict the same class. They share most of their weights, and so make some errors together: few where there are
1,000 classes to choose from, many where there are ten. The rate is therefore an upper bound. Confidences above it are
lowered to it; those below it are raised only in part: the logarithm of the temperature counts in proportion to that of
the number of classes, and completely from 1,000 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from remtta.pipeline.prediction import Callback, Prediction

_HALF_LIFE = 200.0  # in images
_GAIN = 3.0  # a mean confidence falls by about a third if the temperature rises e-fold
_MAX_LOG = 1.0  # bound on the logarithm of the temperature sought
_MANY_CLASSES = 1000


class TemperatureScaling(Callback):
    """Divides the ensemble's logits by one temperature, which follows the stream; no class changes."""

    prefix = "temperature."

    def __init__(self, num_classes: int) -> None:
        self._share = min(1.0, math.log(num_classes) / math.log(_MANY_CLASSES))
        self._log_sought = 0.0

    @property
    def temperature(self) -> float:
        """The divisor of the ensemble's logits."""
        return math.exp(self._log_sought if self._log_sought > 0 else self._share * self._log_sought)

    def on_prediction(self, prediction: Prediction) -> None:
        if prediction.adapted is None or prediction.weight == 0:  # the source model predicts alone
            return
        logits, prediction.temperature = prediction.logits, self.temperature
        prediction.logits = logits / self.temperature
        if prediction.source is not None and prediction.learned.any() and not prediction.harmful:
            learned = prediction.learned.to(logits.device)
            confidence = (logits[learned] / math.exp(self._log_sought)).softmax(-1).amax(-1).mean()
            agree = (prediction.source[learned].argmax(-1) == prediction.adapted[learned].argmax(-1)).double().mean()
            newest = 1 - 0.5 ** (int(prediction.learned.sum()) / _HALF_LIFE)
            step = _GAIN * newest * float(confidence - agree)
            if math.isfinite(step):
                self._log_sought = min(max(self._log_sought + step, -_MAX_LOG), _MAX_LOG)

    def on_reset(self) -> None:
        self._log_sought = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        return {"log": torch.tensor(self._log_sought, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._log_sought = float(state["log"]) if "log" in state else 0.0  # of a run of 0.5.0
