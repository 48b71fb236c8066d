"""Estimate the accuracy of the source and the adapted model without labels.

Three statistics correlate with accuracy on corrupted images: confidence among the ten likeliest classes (unaffected by
a haze that only flattens the other 990), confidence among all classes, and the diversity of predicted classes. Each is
compared with clean images, on which the model's accuracy is known. The weights were fitted on a ViT for ImageNet
photographs and one for CIFAR-10, both on 15 corruptions (docs/estimates.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from remtta.pipeline.information import largest_scale, parked_class
from remtta.pipeline.prediction import Prediction, PredictionTransform
from remtta.pipeline.smoothing import FilterState

WINDOW = 500
"""Number of frames in an estimate."""

MIN_FRAMES = 100
"""Minimum number of frames for an estimate."""

MIN_GAIN_FRAMES = 200
"""Minimum number of frames of both models for an estimate of their difference."""

_GAIN_ERRORS = 0.03, 0.45  # standard error of the difference beyond that of sampling: constant and relative
_CENTERING_GAIN, _CENTERING_ERROR = 0.15, 0.06  # share of the changed predictions, and its standard error
_DECISIVE = 0.45  # share of the changed predictions that became right or wrong
_SHUFFLED = -5.0  # nats of evidence for order, below which classes are shuffled
_LIKELIEST = 10
_WEIGHTS = (2.8, -1.4, 0.65)  # of confidence among the likeliest, among all, and of diversity
_ORDERED_WEIGHT = 1.44  # of confidence among the likeliest, if labels persist and diversity is meaningless
_FEWEST_PAIRS = 1e-4  # share of pairs of equal classes; below it, higher diversity cannot be distinguished from chance
_BISECTIONS = 40
_HYSTERESIS = 0.02  # how far an estimate must rise above the limit before it can expire again
_CLASS = 2  # column of the predicted class in a window
_MODELS = ("source", "adapted")


@dataclass(frozen=True)
class Calibration:
    """A model's predictions on clean images, summarised."""

    accuracy: float  # accuracy on them
    scale: float  # factor for the logits that makes the mean confidence equal the accuracy
    scale_likeliest: float  # the same among the ten likeliest classes
    diversity: float  # diversity of the predicted classes, in nats
    images: int  # number of images; 0 if only the accuracy is known

    @classmethod
    def assumed(cls, accuracy: float, num_classes: int) -> Calibration:
        """Return the assumptions without images: confidence is calibrated, and classes are equally frequent."""
        return cls(accuracy, 1.0, 1.0, math.log(num_classes), 0)

    @classmethod
    def fit(cls, accuracy: float, logits: Tensor) -> Calibration:
        """Calibrate on logits (B, C) of clean images."""

        def scale_of(each: Tensor) -> float:
            return largest_scale(lambda scale: float(_certainty(each * scale).mean()) < accuracy, _BISECTIONS)

        logits = logits.double()
        scales = scale_of(logits), scale_of(_likeliest(logits))
        return cls(accuracy, *scales, _diversity(logits.argmax(1)), len(logits))


def _likeliest(logits: Tensor) -> Tensor:
    return logits.topk(min(_LIKELIEST, logits.shape[1])).values


def _certainty(logits: Tensor) -> Tensor:
    return logits.softmax(-1).amax(1)


def _diversity(classes: Tensor) -> float:
    """Return the Rényi entropy of order 2 of the predicted classes, in nats: hardly biased by their number."""
    counts = torch.bincount(classes.long()).double()
    pairs = float((counts * (counts - 1)).sum()) / max(1, len(classes) * (len(classes) - 1))
    return -math.log(pairs + _FEWEST_PAIRS)


def _diversity_drop(classes: Tensor, known: Calibration) -> float:
    """Return the drop in diversity from clean images, in nats, reduced by one standard error."""
    diversity = _diversity(classes)
    errors = (
        [_diversity_stderr(diversity, len(classes)), _diversity_stderr(known.diversity, known.images)]
        if known.images
        else [0.0]
    )
    return diversity - known.diversity + math.hypot(*errors)


def _diversity_stderr(diversity: float, images: int) -> float:
    """Return the standard error of a diversity of `images` images: 1 / sqrt(number of pairs of equal classes)."""
    pairs = math.exp(-diversity) * images * (images - 1) / 2
    return 1 / math.sqrt(pairs) if pairs else math.inf


class Estimator(PredictionTransform):
    """Estimates the accuracy of the last frames' predictions.

    Diversity counts only while frames are unordered: a camera that sees one class for a while is not worse. Predictions
    are taken before centering, so its gain is not included, except of a method that `only_centers`: there it follows
    from how many classes centering changed. Below the accuracy `expire_below`, it emits an "expired" event.
    """

    prefix = "accuracy."

    def __init__(
        self,
        calibration: Calibration,
        num_classes: int,
        expire_below: float | None = None,
        *,
        adapts: bool = True,
        only_centers: bool = False,
    ) -> None:
        self.calibration, self._expire_below, self._adapts = calibration, expire_below, adapts
        self._only_centers = only_centers
        self._expired = False
        self._events: list[dict[str, Any]] = []
        self._num_classes, self._log_classes = num_classes, math.log(num_classes)
        self._windows = {name: torch.empty(0, 3, dtype=torch.float64) for name in _MODELS}
        self._filter = FilterState.initial(num_classes)
        self._weight = 1.0

    def __call__(self, prediction: Prediction) -> Prediction:
        """Record the next frames, before their predictions are smoothed; early ones come again."""
        if not prediction.early:
            self._add(prediction)
        return replace(prediction, estimates=self.estimates)

    def _add(self, prediction: Prediction) -> None:
        self._weight = prediction.weight if self._adapts else 0.0
        alone = "source" if self._weight == 0 else "adapted"
        # Without centering, whose effect the clean images do not show.
        raw = {"source": prediction.raw_source, "adapted": prediction.raw_adapted if self._adapts else None}
        if raw[alone] is None:
            raw[alone] = prediction.raw_adapted
        facts = {name: self._facts(logits.cpu().double()) for name, logits in raw.items() if logits is not None}
        if self._only_centers and prediction.adapted is not None:
            facts["source"] = facts["adapted"].clone()
            facts["adapted"][:, _CLASS] = prediction.adapted.argmax(1).cpu().double()
        for name, new in facts.items():
            self._windows[name] = torch.cat([self._windows[name], new])[-WINDOW:]
        if "adapted" not in facts:
            self._windows["adapted"] = self._windows["adapted"][:0]
        *_, self._filter = self._filter.after(prediction.logits.cpu())
        self._judge()

    def _judge(self) -> None:
        """Emit an event once when the estimate falls below the limit, and again after it recovered."""
        answering = self._windows.values() if self._weight > 0 else [self._windows["source"]]
        if self._expire_below is None or max(map(len, answering)) < WINDOW:
            return
        estimate = self.estimates["answers"]
        if estimate < self._expire_below and not self._expired:
            self._events.append({"event": "expired", "estimate": estimate, "expire_below": self._expire_below})
        self._expired = estimate < self._expire_below + _HYSTERESIS * self._expired

    def events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def _facts(self, logits: Tensor) -> Tensor:
        calibration = self.calibration
        likeliest = _certainty(_likeliest(logits) * calibration.scale_likeliest)
        return torch.stack([likeliest, _certainty(logits * calibration.scale), logits.argmax(1).double()], dim=1)

    @property
    def estimates(self) -> dict[str, float]:
        """Accuracies of `source`, `adapted` and `answers` (of both: the better one's) in the last frames, if known.

        Where the evidence holds, also the adapted model's `gain` over the source model, and half its 95 % interval.
        """
        found = {name: self._accuracy_of(window) for name, window in self._windows.items() if len(window) >= MIN_FRAMES}
        gain = self._gain_of_centering() if self._only_centers else self._gain(found)
        if self._only_centers and len(found) == len(_MODELS):
            found["adapted"] = min(1.0, found["source"] + gain.get("gain", 0.0))
        if answering := [accuracy for name, accuracy in found.items() if self._weight > 0 or name == "source"]:
            found["answers"] = max(answering)
        return {name: round(value, 4) for name, value in (found | gain).items()}

    def _gain_of_centering(self) -> dict[str, float]:
        """Return the gain by the number of classes that centering changed, for shuffled frames of several classes."""
        count = min(map(len, self._windows.values()))
        if count < MIN_GAIN_FRAMES or self._filter.evidence > _SHUFFLED:
            return {}
        before, after = (window[-count:, _CLASS].long() for window in self._windows.values())
        if parked_class(before, self._num_classes) is not None:
            return {}
        changed = float((before != after).double().mean())
        error = math.hypot(math.sqrt(_DECISIVE * changed / count), _CENTERING_ERROR * changed)
        return {"gain": _CENTERING_GAIN * changed, "gain_error": 2 * error}

    def _gain(self, found: Mapping[str, float]) -> dict[str, float]:
        windows = self._windows.values()
        known = self.calibration.images and min(map(len, windows)) >= MIN_GAIN_FRAMES
        if not known or self._filter.evidence > _SHUFFLED:
            return {}
        weights = torch.tensor(_WEIGHTS[:2], dtype=torch.float64)
        sampling = sum(float((window[:, :2] @ weights).var()) / len(window) for window in windows)
        constant, relative = _GAIN_ERRORS
        gain = found["adapted"] - found["source"]
        return {"gain": gain, "gain_error": 2 * math.sqrt(sampling + constant**2 + (relative * gain) ** 2)}

    def _accuracy_of(self, window: Tensor) -> float:
        known = self.calibration
        likeliest, among_all = (window[:, :2].mean(0) - known.accuracy).tolist()
        if self._filter.ordered:
            change = min(0.0, _ORDERED_WEIGHT * likeliest)
        else:
            less = min(0.0, _diversity_drop(window[:, 2], known)) / self._log_classes
            change = min(0.0, _WEIGHTS[0] * likeliest + _WEIGHTS[1] * among_all) + _WEIGHTS[2] * less
        return min(1.0, max(0.0, float(known.accuracy + change)))

    def record(self) -> dict[str, Any]:
        """Return calibration and estimates, for `run.json`."""
        return {"calibration": asdict(self.calibration), "last": self.estimates}

    def state_dict(self) -> dict[str, Tensor]:
        now = torch.tensor([self._weight, self._expired], dtype=torch.float64)
        return {**self._windows, "now": now, **self._filter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._windows = {name: state[name].clone() for name in _MODELS}
        self._weight, expired = state["now"].tolist()
        self._expired, self._filter = bool(expired), FilterState.from_state(state)
