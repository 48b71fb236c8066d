"""The path of a batch: both models predict, logits are centered, the guard judges, and the method updates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.pipeline.forward import adapted_logits, ensemble, shifted, shuffled_logits, source_logits
from remtta.pipeline.guard import Guard
from remtta.pipeline.prediction import Callback, Prediction
from remtta.pipeline.state import PipelineState

BETWEEN_UPDATES = "between updates"
"""Reason why a frame is not learned from: `adapt_every`."""


class Pipeline(PipelineState):
    """A model that adapts while it predicts: `predict` a batch, then `learn` from it.

        prediction = pipeline.predict(images)
        pipeline.learn()

    `remtta adapt`, `eval`, `remtta.Adapter` and many streams all use it. Raise UsageError if `adapt_every` is above 1,
    and updates do not last beyond their batch.
    """

    def __init__(
        self, method: Method[MethodConfig], guard: Guard | None = None, callbacks: Sequence[Callback] = ()
    ) -> None:
        every = method.config.adapt_every
        if every > 1 and not method.keeps_updates:
            raise UsageError(
                f"with adapt_every={every}, updates must last to the next batch, and these do not (a method "
                "without training, or episodic); use adapt_every=1"
            )
        super().__init__(method, guard, callbacks)
        changes = method.norms_only and bool(method.model.weights.parameters) and not method.model.batch_norms.mixes
        self._interpolates = every > 1 and changes
        # Both models then see different copies of an image; models with batch norms do not gain from this.
        self._shifts = guard is not None and guard.options.answer == "both" and not method.model.backbone.batch_norms

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict images (B, 3, H, W), and learn from them, with labels (B,) if needed; return logits (B, C)."""
        prediction = self.predict(images)
        self.learn(labels)
        return prediction.logits

    # A batch.

    @torch.no_grad()
    def predict(
        self,
        images: Tensor,
        learnable: Tensor | None = None,
        *,
        update: bool = True,
        latency: bool = False,
        early: bool = False,
    ) -> Prediction:
        """Predict a batch with the weights before the update that `learn` makes.

        Args:
            images: Preprocessed, shape (B, 3, H, W).
            learnable: Which of them represent the stream, for the method, the centering and the guard; shape (B,), on
                the CPU; None for all.
            update: False if `learn` does not follow, because `skip_reason` gave a reason.
            latency: Return as early as possible, even if `learn` takes longer then.
            early: The images come again, with the rest of their batch.

        Raises:
            ValueError: If the images are not a batch of valid images.
            UsageError: If the method has yet to learn from source images.
        """
        images = self.method.model.transform(images)
        learnable = torch.ones(len(images), dtype=torch.bool) if learnable is None else learnable
        learned = learnable if update and not self.retired else torch.zeros_like(learnable)
        prediction = self._prediction = Prediction(learned=learned, early=early, weight=self.weight)
        learns = bool(learned.any())
        if self._interpolates and not learns and 0 < prediction.weight < 1:
            self._predict_in_one_pass(images, learnable, prediction)
        else:
            self._predict_by_models(images, learnable, prediction, latency=latency)
        for callback in self.callbacks:
            callback.on_prediction(prediction)
        return prediction

    def learn(self, labels: Tensor | None = None) -> None:
        """Update by the images of the last `predict`, unless they are harmful; with labels (B,) if the method needs
        them. Restore the source weights if the guard decided so.
        """
        prediction, self._prediction = self._prediction, None
        if prediction is None or not prediction.learned.any():
            return
        restores = self.guard is not None and self.guard.restores
        if not prediction.harmful:
            labels = labels[prediction.learned.to(labels.device)] if labels is not None else None
            if self.method.step(self.centering.adapted, labels):
                self.centering.reset_adapted()
            if self.guard is not None:
                prediction.harmful = restores = self.guard.rejects(self.method.model.weights)
        if restores:
            self.method.reset()
            self.centering.reset_adapted()
        if self.guard is not None:
            self.method.optimizer.scale_lr(self.guard.lr_scale)

    def _predict_by_models(self, images: Tensor, learnable: Tensor, prediction: Prediction, *, latency: bool) -> None:
        """Predict with the source model, the adapted one, or both, as the guard weights them."""
        method, centering = self.method, self.centering
        learned, learns = prediction.learned, bool(prediction.learned.any())
        if prediction.weight < 1 or (self.guard is not None and learns):
            copies = shifted(images) if self._shifts and prediction.weight > 0 else images
            source = prediction.raw_source = source_logits(method, copies)
            centering.update_source(source, learnable, partial(shuffled_logits, method, copies, of_source=True))
            prediction.source = centering.source(source)
        if prediction.weight > 0 or learns:
            if learns and prediction.source is not None:
                method.source_logits = prediction.source[learned.to(images.device)]
            adapted = prediction.raw_adapted = adapted_logits(method, images, learnable, learned, latency=latency)
            # With batch norms, single views would have no statistics of a batch.
            shuffled = None if method.model.batch_norms.mixes else partial(shuffled_logits, method, images)
            centering.update_adapted(adapted, learnable, shuffled)
            prediction.adapted = method.output(centering.adapted(adapted))
            if self.guard is not None and learns:
                self.guard.judge(prediction, centering.adapted(adapted), method.model.weights)
        self.num_source_predictions += len(images) * (prediction.source is not None and prediction.adapted is not None)
        if self._shifts and prediction.harmful:  # the source model predicts alone, so it sees the images themselves
            prediction.raw_source = source_logits(method, images)
            prediction.source = centering.source(prediction.raw_source)
        prediction.logits = ensemble(prediction.source, prediction.adapted, prediction.weight)

    def _predict_in_one_pass(self, images: Tensor, learnable: Tensor, prediction: Prediction) -> None:
        """Predict with weights between the source and the adapted ones, for half the time of an ensemble."""
        method, centering = self.method, self.centering
        with method.model.weights.between(prediction.weight):
            logits = method.predict(images, counted=bool(learnable.all()))
            centering.update_source(logits, learnable, partial(shuffled_logits, method, images))
        centering.update_adapted(logits, learnable)
        prediction.raw_adapted, prediction.logits = logits, method.output(centering.adapted(logits))

    # What it is.

    @property
    def weight(self) -> float:
        """The adapted model's present weight in predictions."""
        if self.frozen and self.at_source:
            return 0.0
        return 1.0 if self.guard is None else self.guard.weight

    @property
    def retired(self) -> bool:
        """True if the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.status.retired

    @property
    def total_alarms(self) -> int:
        """Number of alarms of the guard so far."""
        return 0 if self.guard is None else self.guard.status.total_alarms

    @property
    def learns(self) -> bool:
        """True if a batch may still change the weights."""
        return self.method.adapts and not self.retired and not self.frozen

    def skip_reason(self, learnable: Tensor) -> str | None:
        """Return why the next batch, with learnable images (B,), is not learned from, or None."""
        every = self.method.config.adapt_every
        if every == 1 or self.retired or not learnable.any():
            return None
        self._num_batches += 1
        return None if self._num_batches % every == 1 else BETWEEN_UPDATES
