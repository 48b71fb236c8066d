"""Temperature scaling without labels: confidences that say how often predictions are right.

The temperature is sought at which the mean confidence equals an estimate of the rate of right predictions.

Two models of the same accuracy that err independently agree about as often as each is right, if their ensemble is
calibrated (Jiang et al., "Assessing Generalization of SGD via Disagreement", ICLR 2022, arXiv:2106.13799). So the rate
of an ensemble is how often the source and the adapted model predict the same class, corrected:

- The models share most of their weights, and so make some errors together: some where there are 1,000 classes to choose
  from, more where there are ten. So the rate also falls with how many of the source model's predictions the ensemble
  changed, but not where recent statistics of batch norms tell the models apart, too.
- If the shift ruined the source model, the two agree more rarely than the adapted model is right. Then adaptation also
  made predictions more confident than the source's are, and than the two agree: the rate rises by this difference.
- Models that recent statistics of batch norms alone tell apart are less accurate than their ensemble, the more, the
  more they disagree. Training, which makes models agree on errors, too, takes this away.

Centered logits of one model are no second opinion. Their rate is the confidence of the logits before centering; with
few classes, changed predictions lower it, as the shift that they show makes others wrong; with many, they raise it a
little. What raises the rate counts in proportion to the logarithm of the number of classes, and completely from 1,000
on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from remtta.pipeline.prediction import Prediction, PredictionTransform

HALF_LIFE = 100.0  # in images
GAIN = 3.0  # a mean confidence falls by about a third if the temperature rises e-fold
MAX_LOG = 1.5  # bound on the logarithm of the temperature sought
CORRECTED = 0.15  # of the images on which predictions differ without training: how many more are right for it
_UNCHANGED_EXPONENTS = (1.25, 0.5)  # of the fraction of unchanged predictions in an ensemble's rate: few, many classes
_MANY_CLASSES = 1000


def share_of(num_classes: int) -> float:
    """Return the logarithm of the number of classes relative to that of many, 0 to 1."""
    return min(1.0, math.log(num_classes) / math.log(_MANY_CLASSES))


class TemperatureScaling(PredictionTransform):
    """Divides the logits of an ensemble, or centered ones, by one temperature, which follows the stream.

    No class changes.

    Args:
        trains: Whether weights of the adapted model are trained.
        moves: Whether its batch norms follow the stream.
    """

    prefix = "temperature."

    def __init__(self, num_classes: int, *, trains: bool, moves: bool = False) -> None:
        self._share = share_of(num_classes)
        few, many = _UNCHANGED_EXPONENTS
        self._exponent = 0.0 if moves else few + (many - few) * self._share
        self._corrected = 0.0 if trains else CORRECTED
        self._log_sought = 0.0

    @property
    def temperature(self) -> float:
        """The divisor of the logits."""
        return math.exp(self._log_sought if self._log_sought > 0 else self._share * self._log_sought)

    def __call__(self, prediction: Prediction) -> Prediction:
        if prediction.weight == 0:  # the source model predicts alone
            return prediction
        logits, temperature = prediction.logits, self.temperature
        counted = prediction.learned.to(logits.device) & torch.isfinite(logits).all(-1)
        if prediction.adapted is not None and counted.any() and not prediction.harmful:
            rate = self._rate(prediction, counted)
            newest = 1 - 0.5 ** (int(counted.sum()) / HALF_LIFE)
            step = GAIN * newest * (_confidence(logits[counted] / math.exp(self._log_sought)) - rate)
            if math.isfinite(step):
                self._log_sought = min(max(self._log_sought + step, -MAX_LOG), MAX_LOG)
        return replace(prediction, logits=logits / temperature, temperature=temperature)

    def _rate(self, prediction: Prediction, counted: Tensor) -> float:
        """Estimate the rate of right predictions among the counted images (B,)."""
        raw = prediction.raw_adapted if prediction.raw_source is None else prediction.raw_source
        assert raw is not None
        assert prediction.adapted is not None
        raw, adapted = raw[counted], prediction.adapted[counted]
        unchanged = _agreement(raw, prediction.logits[counted])
        if prediction.source is None:
            return _confidence(raw) * unchanged ** (1 - self._share) + self._share * CORRECTED * (1 - unchanged)
        source = prediction.source[counted]
        agree, by_source = _agreement(source, adapted), _confidence(source)
        gained = max(0.0, _confidence(adapted) - max(agree, by_source))
        rate = agree * unchanged**self._exponent
        return rate + self._share * (self._corrected * (1 - agree) + gained)

    def on_reset(self) -> None:
        self._log_sought = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        return {"log": torch.tensor(self._log_sought, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._log_sought = float(state["log"]) if "log" in state else 0.0  # of a run of 0.5.0


def _confidence(logits: Tensor) -> float:
    """Return the mean probability of the likeliest class."""
    return float(logits.float().softmax(-1).amax(-1).mean())


def _agreement(logits: Tensor, others: Tensor) -> float:
    """Return the fraction of images for which two models' logits (B, C) predict the same class."""
    return float((logits.argmax(-1) == others.argmax(-1)).float().mean())
