"""Temperature scaling without labels: confidences of the ensemble that say how often it is right.

Two models of the same accuracy that err independently agree about as often as they are right, if their ensemble is
calibrated (Jiang et al., "Assessing Generalization of SGD via Disagreement", ICLR 2022, arXiv:2106.13799). So the
temperature is sought at which the mean confidence of the ensemble equals the rate at which the source and the adapted
model predict the same class. Two corrections:

- If the shift ruined the source model, the two agree more rarely than the adapted model is right. Then adaptation also
  made predictions more confident than the source's are, and than the two agree: the rate rises by this difference.
- The models share most of their weights, and so make some errors together: few where there are 1,000 classes to choose
  from, many where there are ten. So what raises confidences, this difference and temperatures below 1 (their
  logarithm), counts in proportion to the logarithm of the number of classes, and completely from 1,000 on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from remtta.pipeline.prediction import Prediction, PredictionTransform

_HALF_LIFE = 200.0  # in images
_GAIN = 3.0  # a mean confidence falls by about a third if the temperature rises e-fold
_MAX_LOG = 1.0  # bound on the logarithm of the temperature sought
_MANY_CLASSES = 1000


class TemperatureScaling(PredictionTransform):
    """Divides the ensemble's logits by one temperature, which follows the stream; no class changes."""

    prefix = "temperature."

    def __init__(self, num_classes: int) -> None:
        self._share = min(1.0, math.log(num_classes) / math.log(_MANY_CLASSES))
        self._log_sought = 0.0

    @property
    def temperature(self) -> float:
        """The divisor of the ensemble's logits."""
        return math.exp(self._log_sought if self._log_sought > 0 else self._share * self._log_sought)

    def __call__(self, prediction: Prediction) -> Prediction:
        if prediction.adapted is None or prediction.weight == 0:  # the source model predicts alone
            return prediction
        logits, temperature = prediction.logits, self.temperature
        if prediction.source is not None and prediction.learned.any() and not prediction.harmful:
            learned = prediction.learned.to(logits.device)
            source, adapted = prediction.source[learned], prediction.adapted[learned]
            agree = float((source.argmax(-1) == adapted.argmax(-1)).double().mean())
            gained = max(0.0, _confidence(adapted) - max(agree, _confidence(source)))
            newest = 1 - 0.5 ** (len(source) / _HALF_LIFE)
            confidence = _confidence(logits[learned] / math.exp(self._log_sought))
            step = _GAIN * newest * (confidence - agree - self._share * gained)
            if math.isfinite(step):
                self._log_sought = min(max(self._log_sought + step, -_MAX_LOG), _MAX_LOG)
        return replace(prediction, logits=logits / temperature, temperature=temperature)

    def on_reset(self) -> None:
        self._log_sought = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        return {"log": torch.tensor(self._log_sought, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._log_sought = float(state["log"]) if "log" in state else 0.0  # of a run of 0.5.0


def _confidence(logits: Tensor) -> float:
    """The mean probability of the likeliest class."""
    return float(logits.softmax(-1).amax(-1).mean())
