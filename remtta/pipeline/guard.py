"""The guard: weights the models' predictions, and decides without labels when adaptation does harm."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.source import CentredSource, Source
from remtta.models.weights import AdaptedWeights
from remtta.options import GuardOptions
from remtta.pipeline.harm import NOT_FINITE, HarmDetector
from remtta.pipeline.prediction import Prediction


def guard_for(method: Method[MethodConfig], options: GuardOptions | None) -> Guard | None:
    """Return a guard for a method, or None if it would have nothing to do; see `Guard`.

    Harm can only be undone for a method with lasting changes to the weights; predictions can be averaged for any method
    whose predictions differ from the source model's.
    """
    config = method.config
    forgets = config.episodic and config.answer is None  # and predicts before it learns
    same = isinstance(method, CentredSource) and not method.model.batch_norms.mixes  # as the source model, centered
    if options is None or type(method) is Source or forgets or same:
        return None
    options = options.filled()
    if not method.keeps_updates:
        options = replace(options, action="off")
    return None if (options.action, options.answer) == ("off", "adapted") else Guard(options)


class Guard:
    """Weights the adapted model's predictions by what a `HarmDetector` finds in the last frames.

    If the adapted model is far behind the source model, or in doubt for long, the source weights are restored, with a
    fresh optimizer and a lower learning rate. After too many alarms adaptation ends, and the source model predicts.

    Attributes:
        options: Its options, with all defaults filled in.
        watches: Whether it does more than weight predictions.
        detector: The harm detector.
        restores: Whether the source weights are to be restored after the batch last judged.
    """

    def __init__(self, options: GuardOptions) -> None:
        self.options = options.filled()
        self.watches = self.options.action != "off"
        self.detector = HarmDetector(self.options)
        self.restores = False

    @property
    def weight(self) -> float:
        """The adapted model's present weight in predictions."""
        if self.retired:
            return 0.0
        if self.options.answer == "both":
            return 0.5
        return 0.0 if self.detector.status.doubting and self.options.acts else 1.0

    @property
    def retired(self) -> bool:
        """True if it has ended adaptation for good."""
        return self.detector.status.retired

    @property
    def lr_scale(self) -> float:
        return self.options.lr_factor**self.detector.status.alarms

    def judge(self, prediction: Prediction, adapted: Tensor, weights: AdaptedWeights) -> None:
        """Judge a batch before it is learned from: set the prediction's `weight` and `harmful`.

        Args:
            prediction: With the source model's prediction.
            adapted: The adapted model's centered logits (B, C).
            weights: The adapted weights.
        """
        assert prediction.source is not None
        learned = prediction.learned.to(adapted.device)
        source, adapted = prediction.source[learned], adapted[learned]
        if self.watches and not torch.isfinite(adapted).all():
            prediction.harmful, self.restores = True, self.detector.alarm(NOT_FINITE)
        else:
            drift = weights.drift() if self.watches else 0.0
            prediction.harmful = self.restores = self.detector.judge(source, adapted, drift)
        prediction.weight = 0.0 if prediction.harmful else self.weight

    def rejects(self, weights: AdaptedWeights) -> bool:
        """Return whether an update moved weights too far from the source's, which are to be restored then."""
        return self.watches and self.detector.check_drift(weights.drift())

    def max_bytes(self, num_classes: int) -> int:
        """Return the approximate size of its state once the window is full."""
        return self.options.window * 4 * num_classes + 4 * self.options.memory
