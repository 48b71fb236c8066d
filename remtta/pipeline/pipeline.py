"""The path of a batch: both models predict, logits are centered, the guard judges, and the method updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.models.weights import count_in, within
from remtta.pipeline.centering import LogitCentering
from remtta.pipeline.forward import adapted_logits, ensemble, shifted, shuffled_logits, source_logits
from remtta.pipeline.guard import Guard
from remtta.pipeline.prediction import Prediction, PredictionTransform, Update

BETWEEN_UPDATES = "between updates"
"""Reason why a frame is not learned from: `adapt_every`."""

_BATCHES, _CENTERING, _GUARD = "pace.batches", "centering.", "guard."

T = TypeVar("T", bound=PredictionTransform)


class Adaptation(NamedTuple):
    """The result of adaptation; later updates do not modify these tensors."""

    delta: Mapping[str, Tensor]  # adapted minus source weights
    num_updates: int
    num_frames: int  # that the weights have learned from, those of a starting delta included


class Pipeline:
    """A model that adapts while it predicts: `predict` a batch, then `learn` from it.

        prediction = pipeline.predict(images)
        update = pipeline.learn()

    `remtta adapt`, `eval`, `remtta.Adapter` and many streams all use it. Raise UsageError if `adapt_every` is above 1,
    and updates do not last beyond their batch.

    Attributes:
        method: The method, with the adapted model.
        centering: The offsets of both models' logits.
        guard: The guard, if there is one.
        transforms: Applied to every prediction, in order: temperature scaling, accuracy estimate, smoothing.
        frozen: Whether it only predicts from now on: no weight changes any more, nor what logits are centered by.
        source_record: What the method learned from source images, for `run.json`.
        num_source_predictions: Images predicted by the source model besides the adapted one.
        frames_in_delta: Images that the present weights have learned from, those of a starting delta included.
    """

    def __init__(
        self, method: Method[MethodConfig], guard: Guard | None = None, transforms: Sequence[PredictionTransform] = ()
    ) -> None:
        every = method.config.adapt_every
        if every > 1 and not method.keeps_updates:
            raise UsageError(
                f"with adapt_every={every}, updates must last to the next batch, and these do not (a method "
                "without training, or episodic); use adapt_every=1"
            )
        self.method, self.guard, self.transforms = method, guard, list(transforms)
        self.frozen = False
        self.source_record: Mapping[str, Any] | None = None
        self.centering = LogitCentering(method.model.device, active=method.config.center)
        self.num_source_predictions = self.frames_in_delta = 0
        self._num_batches = 0  # since the start or a reset, for `adapt_every`
        self._prediction: Prediction | None = None  # to be learned from
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
            learnable: False for images that the method, the centering and the guard are to ignore, such as black or
                repeated frames; shape (B,), on the CPU; None if all are learnable.
            update: False if no update follows, for lack of time, though the images count for centering and guard.
            latency: Return as early as possible, even if `learn` takes longer then.
            early: The images come again, with the rest of their batch.

        Raises:
            ValueError: If the images are not a batch of valid images.
            UsageError: If the method has yet to learn from source images.
        """
        images = self.method.model.transform(images)
        if self.method.config.episodic:
            self.reset()
        learnable = torch.ones(len(images), dtype=torch.bool) if learnable is None else learnable
        learnable = learnable & self.adapts
        skipped = self._skip_reason(learnable) if update else None
        learns = update and skipped is None and not self.disabled
        learned = learnable if learns else torch.zeros_like(learnable)
        num_updates = self.method.num_updates
        if self._interpolates and not learned.any() and 0 < self.weight < 1:
            predicted = self._predict_in_one_pass(images, learnable)
        else:
            predicted = self._predict_by_models(images, learnable, learned, latency=latency)
        prediction = Prediction(**predicted, learned=learned, num_updates=num_updates, skipped=skipped, early=early)
        for transform in self.transforms:
            prediction = transform(prediction)
        self._prediction = prediction
        return prediction

    def learn(self, labels: Tensor | None = None) -> Update:
        """Update by the images of the last `predict`, with labels (B,) if the method needs them; or restore the source
        weights, if the guard found harm.
        """
        prediction, self._prediction = self._prediction, None
        if prediction is None or not prediction.learned.any():
            return Update()
        method, guard, reset = self.method, self.guard, prediction.harmful
        if not prediction.harmful:
            labels = labels[prediction.learned.to(labels.device)] if labels is not None else None
            reset = method.step(self.centering.adapted, labels)
            method.optimizer.zero_grad()  # an optimizer of the caller would use the gradients
        method.source_logits = None
        num_steps = max(method.num_updates, 1) if reset else method.num_updates - prediction.num_updates
        undone = prediction.harmful or (guard is not None and guard.rejects(method.model.weights))
        if undone:
            method.reset()
        if reset or undone:
            self.centering.reset_adapted()
            self.frames_in_delta = 0
        if num_steps and method.num_updates:
            self.frames_in_delta += int(prediction.learned.sum())
        if guard is not None:
            method.optimizer.scale_lr(guard.lr_scale)
        return Update(0 if undone else num_steps, reset or undone)

    def _predict_by_models(
        self, images: Tensor, learnable: Tensor, learned: Tensor, *, latency: bool
    ) -> dict[str, Any]:
        """Return the fields of a prediction by the source model, the adapted one, or both, by the guard's weight."""
        method, centering, guard, weight, harmful = self.method, self.centering, self.guard, self.weight, False
        learns = bool(learned.any())
        source = raw_source = adapted = raw_adapted = None
        shifts = self._shifts and weight > 0
        if weight < 1 or (guard is not None and learns):
            copies = shifted(images) if shifts else images
            raw_source = source_logits(method, copies)
            centering.update_source(raw_source, learnable, partial(shuffled_logits, method, copies, of_source=True))
            source = centering.source(raw_source)
        if weight > 0 or learns:
            if learns and source is not None:
                method.source_logits = source[learned.to(images.device)]
            raw_adapted = adapted_logits(method, images, learnable, learned, latency=latency)
            # With batch norms, single views would have no statistics of a batch.
            shuffled = None if method.model.batch_norms.mixes else partial(shuffled_logits, method, images)
            centering.update_adapted(raw_adapted, learnable, shuffled)
            centered = centering.adapted(raw_adapted)
            adapted = method.output(centered)
            if guard is not None and learns and source is not None:
                rows = learned.to(images.device)
                weight, harmful = guard.judge(source[rows], centered[rows], method.model.weights)  # of this batch
        self.num_source_predictions += len(images) * (source is not None and adapted is not None)
        if self._shifts and harmful:  # the source model predicts alone, so it sees the images themselves
            raw_source = source_logits(method, images)
            source = centering.source(raw_source)
        logits = ensemble(source, adapted, weight)
        models = {"source": source, "adapted": adapted, "raw_source": raw_source, "raw_adapted": raw_adapted}
        return {"logits": logits, "weight": weight, "harmful": harmful, "shifted": shifts and not harmful, **models}

    def _predict_in_one_pass(self, images: Tensor, learnable: Tensor) -> dict[str, Any]:
        """Return the fields of a prediction with weights between the source and the adapted ones, for half the time of
        an ensemble.
        """
        method, centering, weight = self.method, self.centering, self.weight
        with method.model.weights.between(weight):
            raw = method.predict(images, counted=bool(learnable.all()))
            centering.update_source(raw, learnable, partial(shuffled_logits, method, images))
        centering.update_adapted(raw, learnable)
        return {"logits": method.output(centering.adapted(raw)), "weight": weight, "raw_adapted": raw}

    def _skip_reason(self, learnable: Tensor) -> str | None:
        """Count a batch with learnable images (B,); return why the schedule leaves it out of updates, or None."""
        every = self.method.config.adapt_every
        if every == 1 or self.disabled or not learnable.any():
            return None
        self._num_batches += 1
        return None if self._num_batches % every == 1 else BETWEEN_UPDATES

    # What it is.

    @property
    def frozen(self) -> bool:
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = self.method.model.batch_norms.fixed = frozen

    @property
    def adapts(self) -> bool:
        """True if images may still change something: weights, or what logits are centered by."""
        return self.method.adapts and not self.frozen

    @property
    def learns(self) -> bool:
        """True if a batch may still lead to an update."""
        return self.adapts and not self.disabled

    @property
    def disabled(self) -> bool:
        """True if the guard has ended adaptation for good."""
        return self.guard is not None and self.guard.status.disabled

    @property
    def weight(self) -> float:
        """The adapted model's present weight in predictions."""
        if self.frozen and self.at_source:
            return 0.0
        return 1.0 if self.guard is None else self.guard.weight

    @property
    def at_source(self) -> bool:
        """True if nothing was learned since the start or a reset, neither weights nor offsets of the logits."""
        delta, num_updates = self.method.model.weights.committed
        return not num_updates and not any(t.any() for t in (*delta.values(), *self.centering.offsets.values()))

    @property
    def passes_per_image(self) -> float:
        """Approximate cost of an image in plain forward passes, on average over updates and batches between them."""
        every, both = self.method.config.adapt_every, self.guard is not None
        return (sum(self.method.passes()) + both + every - 1) / every

    @property
    def total_alarms(self) -> int:
        """Number of alarms of the guard so far."""
        return 0 if self.guard is None else self.guard.status.total_alarms

    def find(self, kind: type[T]) -> T | None:
        return next((transform for transform in self.transforms if isinstance(transform, kind)), None)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of guard, centering and transforms since the last call."""
        guard = [] if self.guard is None else self.guard.events()
        others = (event for transform in self.transforms for event in transform.events())
        return [*guard, *self.centering.events(), *others]

    # The adaptation state that is saved and reset together.

    @property
    def committed(self) -> Adaptation:
        """The result as of the last update; the head's bias holds the adapted model's offset."""
        delta, num_updates = self.method.model.weights.committed
        if not self.method.delta_refusal:
            delta = self.method.model.shift_biases(delta, self.centering.offsets["adapted"])
        return Adaptation(delta, num_updates, self.frames_in_delta)

    def delta(self) -> dict[str, Tensor]:
        """Return adapted minus source weights, by parameter name; adding them restores the adapted ones exactly."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.committed.delta.items()}

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0, num_frames: int = 0) -> None:
        """Start from source plus delta, the result of updates by these frames, with nothing else learned; raise
        DeltaError if it does not fit the model.
        """
        self._prediction = None
        self.method.load_delta(delta, num_updates)
        self.centering.reset()
        self.frames_in_delta = num_frames

    def reset(self) -> None:
        """Restore the source weights, exactly."""
        self._prediction = None
        self.method.reset()
        self.centering.reset()
        self._num_batches = self.frames_in_delta = 0
        if self.guard is not None:
            self.guard.reset()
        for transform in self.transforms:
            transform.on_reset()

    def start_new_stream(self) -> None:
        """Restore the source weights for an independent stream, of which nothing is known yet."""
        self.reset()
        if self.guard is not None:
            self.guard.start_new_stream()
            self.method.optimizer.scale_lr(self.guard.lr_scale)
        for transform in self.transforms:
            transform.on_new_stream()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update and prediction depend on, on the CPU."""
        state = self.method.state_dict()
        state |= {_CENTERING + name: tensor for name, tensor in self.centering.state_dict().items()}
        if self.method.config.adapt_every > 1:
            state[_BATCHES] = torch.tensor(self._num_batches)
        if self.guard is not None:
            state |= {_GUARD + name: tensor for name, tensor in self.guard.state_dict().items()}
            state[_GUARD + "looked"] = torch.tensor(self.num_source_predictions)
        for transform in self.transforms:
            state |= {transform.prefix + name: tensor for name, tensor in transform.state_dict().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise DeltaError or another exception if it does not fit."""
        self._prediction = None
        for transform in self.transforms:
            transform.load_state_dict(within(transform.prefix, state))
        if self.method.config.adapt_every > 1:
            self._num_batches = count_in(state, _BATCHES)
        self.method.load_state_dict(state)
        self.centering.load_state_dict(within(_CENTERING, state))
        if self.guard is not None:
            self.guard.load_state_dict(within(_GUARD, state))
            self.num_source_predictions = count_in(state, _GUARD + "looked")
            self.method.optimizer.scale_lr(self.guard.lr_scale)
