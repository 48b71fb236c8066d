"""The parts of a pipeline, and their state: what is saved, restored and reset together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.models.weights import Committed, count_in, within
from remtta.pipeline.centering import LogitCentering
from remtta.pipeline.guard import Guard
from remtta.pipeline.prediction import Callback, Prediction

_BATCHES, _CENTERING, _GUARD = "pace.batches", "centering.", "guard."

C = TypeVar("C", bound=Callback)


class PipelineState:
    """A method with what surrounds it.

    Attributes:
        method: The method, with the adapted model.
        centering: The offsets of both models' logits.
        guard: The guard, if there is one.
        callbacks: Called with every prediction, in order: temperature scaling, estimator, smoother.
        frozen: Whether it only predicts from now on: no weight changes any more, nor what logits are centered by.
        source_record: What the method learned from source images, for `run.json`.
        num_source_predictions: Images predicted by the source model besides the adapted one.
    """

    def __init__(self, method: Method[MethodConfig], guard: Guard | None, callbacks: Sequence[Callback]) -> None:
        self.method, self.guard, self.callbacks = method, guard, list(callbacks)
        self.frozen = False
        self.source_record: Mapping[str, Any] | None = None
        self.centering = LogitCentering(method.model.device, active=method.config.centre)
        self.num_source_predictions = 0
        self._num_batches = 0  # since the start or a reset, for `adapt_every`
        self._prediction: Prediction | None = None  # to be learned from

    @property
    def frozen(self) -> bool:
        return self._frozen

    @frozen.setter
    def frozen(self, frozen: bool) -> None:
        self._frozen = self.method.model.batch_norms.fixed = frozen

    @property
    def at_source(self) -> bool:
        """True if nothing was learned since the start or a reset, neither weights nor offsets of the logits."""
        delta, num_updates = self.method.model.weights.committed
        return not num_updates and not any(t.any() for t in (*delta.values(), *self.centering.offsets.values()))

    def find(self, kind: type[C]) -> C | None:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    def events(self) -> list[dict[str, Any]]:
        """Return the events of guard and callbacks since the last call."""
        guard = [] if self.guard is None else self.guard.events()
        return [*guard, *(event for callback in self.callbacks for event in callback.events())]

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
        self._prediction = None
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
        for callback in self.callbacks:
            callback.on_reset()

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
        if self.method.config.adapt_every > 1:
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
        if self.method.config.adapt_every > 1:
            self._num_batches = count_in(state, _BATCHES)
        self.method.load_state_dict(state)
        self.centering.load_state_dict(within(_CENTERING, state))
        if self.guard is not None:
            self.guard.load_state_dict(within(_GUARD, state))
            self.num_source_predictions = count_in(state, _GUARD + "looked")
            self.method.optimizer.scale_lr(self.guard.lr_scale)
