"""What happens to a batch: both models predict, logits are centered, the guard judges, and the method updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.errors import UsageError
from remtta.methods.base import Method
from remtta.models.weights import Committed, within
from remtta.pipeline.centering import LogitCentering
from remtta.pipeline.guard import Guard
from remtta.pipeline.information import mixture
from remtta.pipeline.prediction import Callback, Prediction

BETWEEN_UPDATES = "between updates"
"""Reason why a frame is not learned from: `adapt_every`."""

_BATCHES, _CENTERING, _GUARD = "pace.batches", "centering.", "guard."

C = TypeVar("C", bound=Callback)


class Pipeline:
    """A model that adapts while it predicts: `predict` a batch, then `learn` from it.

        prediction = pipeline.predict(images)
        pipeline.learn()

    `remtta adapt`, `eval`, `remtta.Adapter` and many streams all use it. Raise UsageError if `adapt_every` is above 1,
    and updates do not last beyond their batch.

    Attributes:
        method: The method, with the adapted model.
        centering: The offsets of both models' logits.
        guard: The guard, if there is one.
        callbacks: Called with every prediction, in order: estimator, smoother.
        frozen: Whether it only predicts from now on: no weight changes any more, nor what logits are centered by.
        source_record: What the method learned from source images, for `run.json`.
        num_source_predictions: Images predicted by the source model besides the adapted one.
    """

    def __init__(self, method: Method[Any], guard: Guard | None = None, callbacks: Sequence[Callback] = ()) -> None:
        self._every = method.config.adapt_every
        if self._every > 1 and not method.keeps_updates:
            raise UsageError(
                f"with adapt_every={self._every}, updates must last to the next batch, and these do not (a method "
                "without training, or episodic); use adapt_every=1"
            )
        self.method, self.guard, self.callbacks, self.frozen = method, guard, list(callbacks), False
        self.source_record: Mapping[str, Any] | None = None
        self.centering = LogitCentering(method.model.device, active=method.config.centre)
        self.num_source_predictions = 0
        self._num_batches = 0  # since the start or a reset, for `adapt_every`
        self._prediction: Prediction | None = None  # to be learned from
        changes = method.norms_only and bool(method.model.weights.parameters) and not method.model.batch_norms.mixes
        self._interpolates = self._every > 1 and changes
        # Both models then see different copies of an image; models with batch norms do not gain from this.
        self._shifts = guard is not None and guard.options.answer == "both" and not method.model.backbone.batch_norms

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict images (B, 3, H, W), then learn from them, and from labels (B,) if the method needs them; return
        logits (B, C).
        """
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
        if self.guard is not None and self.guard.restores:
            self.method.reset()
            self.centering.reset_adapted()
        elif not prediction.harmful:
            labels = labels[prediction.learned.to(labels.device)] if labels is not None else None
            if self.method.step(self.centering.adapted, labels):
                self.centering.reset_adapted()
        if self.guard is not None:
            self.method.optimizer.scale_lr(self.guard.lr_scale)

    def _predict_by_models(self, images: Tensor, learnable: Tensor, prediction: Prediction, *, latency: bool) -> None:
        """Predict with the source model, the adapted one, or both, as the guard weights them."""
        model, centering = self.method.model, self.centering
        learned, learns = prediction.learned, bool(prediction.learned.any())
        if prediction.weight < 1 or (self.guard is not None and learns):
            copies = shifted(images) if self._shifts and prediction.weight > 0 else images
            source = prediction.raw_source = self.source_logits(copies)
            centering.update_source(source, learnable, partial(self._predict_shuffled, model.source_logits, copies))
            prediction.source = centering.source(source)
        if prediction.weight > 0 or learns:
            adapted = prediction.raw_adapted = self._adapted_logits(images, learnable, learned, latency=latency)
            shuffled = partial(self._predict_shuffled, model.logits, images)
            # With batch norms, single views would have no statistics of a batch.
            centering.update_adapted(adapted, learnable, None if model.batch_norms.mixes else shuffled)
            prediction.adapted = self.method.output(centering.adapted(adapted))
            if self.guard is not None and learns:
                self.guard.judge(prediction, centering.adapted(adapted), model.weights)
        self.num_source_predictions += len(images) * (prediction.source is not None and prediction.adapted is not None)
        if self._shifts and prediction.harmful:  # the source model predicts alone, so it sees the images themselves
            prediction.raw_source = self.source_logits(images)
            prediction.source = centering.source(prediction.raw_source)
        prediction.logits = ensemble(prediction.source, prediction.adapted, prediction.weight)

    def _predict_in_one_pass(self, images: Tensor, learnable: Tensor, prediction: Prediction) -> None:
        """Predict with weights between the source and the adapted ones, for half the time of an ensemble."""
        model = self.method.model
        interpolated = partial(model.weights.between, prediction.weight)

        def predict_interpolated(images: Tensor) -> Tensor:
            with interpolated():
                return model.logits(images)

        with interpolated():
            logits = self.method.predict(images, counted=bool(learnable.all()))
        self.centering.update_source(logits, learnable, partial(self._predict_shuffled, predict_interpolated, images))
        self.centering.update_adapted(logits, learnable)
        prediction.raw_adapted, prediction.logits = logits, self.method.output(self.centering.adapted(logits))

    def source_logits(self, images: Tensor) -> Tensor:
        """Return the source model's logits (B, C) of transformed images (B, 3, H, W), not centered."""
        parts = images.split(self.method.part_size(len(images)))
        return torch.cat([self.method.model.source_logits(part) for part in parts])

    def _adapted_logits(self, images: Tensor, learnable: Tensor, learned: Tensor, *, latency: bool) -> Tensor:
        """Return the adapted model's logits (B, C), those of learned images (B,) for the next `step`."""
        if not learned.any():
            return self.method.predict(images, counted=bool(learnable.all()))
        if learned.all():
            return self.method.predict(images, learn=True, latency=latency)
        others = self.method.predict(images[~learned], counted=False)
        logits = others.new_empty(len(images), others.shape[1])
        logits[~learned] = others
        logits[learned] = self.method.predict(images[learned], learn=True, latency=latency)
        return logits

    def _predict_shuffled(self, predict: Callable[[Tensor], Tensor], images: Tensor, indices: Tensor) -> Tensor:
        model = self.method.model
        views = model.shuffle_patches(images, indices)
        return torch.cat([predict(part) for part in views.split(model.part_size(len(views)))])

    # What it is.

    @property
    def weight(self) -> float:
        """The adapted model's present weight in predictions."""
        return 1.0 if self.guard is None else self.guard.weight

    @property
    def retired(self) -> bool:
        """True if the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.retired

    @property
    def total_alarms(self) -> int:
        """Number of alarms of the guard so far."""
        return 0 if self.guard is None else self.guard.detector.status.total_alarms

    @property
    def learns(self) -> bool:
        """True if a batch may still change the weights."""
        return self.method.adapts and not self.retired and not self.frozen

    def skip_reason(self, learnable: Tensor) -> str | None:
        """Return why the next batch, with learnable images (B,), is not learned from, or None."""
        if self._every == 1 or self.retired or not learnable.any():
            return None
        self._num_batches += 1
        return None if self._num_batches % self._every == 1 else BETWEEN_UPDATES

    def find(self, kind: type[C]) -> C | None:
        """Return the callback of a class, or None."""
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of guard and callbacks since the last call."""
        guard = [] if self.guard is None else self.guard.events()
        return [*guard, *(event for callback in self.callbacks for event in callback.events())]

    # State.

    @property
    def committed(self) -> Committed:
        """Delta and number of updates as of the last update; later updates do not modify them.

        The head's bias holds the adapted model's offset.
        """
        delta, num_updates = self.method.model.weights.committed
        if not self.method.delta_refusal:
            delta = self.method.model.shift_biases(delta, self.centering.offsets["adapted"])
        return delta, num_updates

    def delta(self) -> dict[str, Tensor]:
        """Return adapted minus source weights, by parameter name; adding them restores the adapted ones exactly."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.committed[0].items()}

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with nothing else learned; raise DeltaError if it does not fit the model."""
        self.method.load_delta(delta, num_updates)
        self.centering.reset()

    def reset(self) -> None:
        """Restore the source weights, exactly."""
        self._prediction = None
        self.method.reset()
        self.centering.reset()
        self._num_batches = 0
        if self.guard is not None:
            self.guard.reset()

    def start_new_stream(self) -> None:
        """Restore the source weights for an independent stream, of which nothing is known yet."""
        self.reset()
        if self.guard is not None:
            self.guard.start_new_stream()
            self.method.optimizer.scale_lr(self.guard.lr_scale)
        for callback in self.callbacks:
            callback.on_new_stream()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update and prediction depend on, on the CPU."""
        state = self.method.state_dict()
        state |= {_CENTERING + name: tensor for name, tensor in self.centering.state_dict().items()}
        if self._every > 1:
            state[_BATCHES] = torch.tensor(self._num_batches)
        if self.guard is not None:
            state |= {_GUARD + name: tensor for name, tensor in self.guard.state_dict().items()}
            state[_GUARD + "looked"] = torch.tensor(self.num_source_predictions)
        for callback in self.callbacks:
            state |= {callback.prefix + name: tensor for name, tensor in callback.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise DeltaError or another exception if it does not fit."""
        self._prediction = None
        for callback in self.callbacks:
            callback.load_state_dict(within(callback.prefix, state))
        if self._every > 1:
            self._num_batches = int(state[_BATCHES])
        self.method.load_state_dict(state)
        self.centering.load_state_dict(within(_CENTERING, state))
        if self.guard is not None:
            self.guard.load_state_dict(within(_GUARD, state))
            self.num_source_predictions = int(state[_GUARD + "looked"])
            self.method.optimizer.scale_lr(self.guard.lr_scale)


def shifted(images: Tensor) -> Tensor:
    """Shift images (B, 3, H, W) down and right by 1/28 of their sides: half a patch of 16 in 224 pixels.

    Edges are mirrored. A model's errors on an image and on its copy differ, so their mean is more accurate.
    """
    height, width = images.shape[-2:]
    down, right = max(1, height // 28), max(1, width // 28)
    return F.pad(images, (right, 0, down, 0), mode="reflect")[..., :height, :width]


@torch.no_grad()
def ensemble(source: Tensor | None, adapted: Tensor | None, weight: float) -> Tensor:
    """Return the logits (B, C) of both models' predictions together; `weight` is the adapted model's, 0 to 1."""
    if weight == 0:
        assert source is not None
        return source
    assert adapted is not None
    return adapted if weight == 1 or source is None else mixture(adapted, source, weight)
