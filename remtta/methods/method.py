"""A method applied to a model: the interface for runs and evaluations."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from remtta.errors import UsageError
from remtta.methods.net import Net
from remtta.methods.objective import Descent, Objective, Targets
from remtta.methods.settings import METHOD_TABLE, MethodConfig, check_method, method_config
from remtta.models.weights import Committed, within
from remtta.options import DEFAULT_BATCH_SIZE

DELTA, _UPDATES = "delta.", "updates"

Kind = TypeVar("Kind", bound=Objective[Any])


class Updater(Generic[Kind]):
    """Predicts batches, and adapts to them by an objective, at once or later.

    The model is adapted in place: everything but the selected weights is frozen, and it is put in eval mode. Batch
    norms use statistics as configured; only `predict_source` uses the source's. Raise ModelError if the model cannot be
    adapted, with the reason.

    Attributes:
        net: The model and its adapted weights.
        objective: The method: its loss and its properties.
        last_views: Logits (L, B, C) of the last batch's prediction: the plain view, then the method's others.
    """

    @torch.inference_mode(False)
    def __init__(self, model: nn.Module, config: MethodConfig, objective: type[Kind]) -> None:
        self.net = Net(model, config, objective.chosen, only_predicts=objective.only_predicts)
        self.objective = objective(self.net, config)
        self.last_views: Tensor | None = None
        self._descent = Descent(self.objective)
        self._answered: tuple[Tensor, Targets | None] | None = None  # images and targets of `answer`
        self._has_source = not objective.needs_source
        self._descent.forget()

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Predict a batch with the current weights, or those before its last step, then adapt to it.

        Takes preprocessed images (B, 3, H, W), and labels (B,) if the method needs them; returns logits (B, C), without
        gradient. Raise ValueError if `images` is not a nonempty batch, or labels are missing; UsageError if the method
        has yet to learn from source images.
        """
        self._answered = self._prepared(images), None
        self.learn(labels)
        assert self.last_views is not None
        return self.objective.output(self.last_views[0])

    def answer(self, images: Tensor) -> Tensor:
        """Predict a batch, for `learn` to adapt to; if the prediction depends on the update, adapt at once."""
        config = self.objective.config
        if self.objective.predicts_after or (config.answer == "last" and config.steps > 1):
            return self(images)
        images = self._prepared(images)
        with torch.inference_mode(False), torch.no_grad():  # the update may save the targets for its backward pass
            logits, targets = self.objective.answer(images)
        self._answered = images, targets
        return logits

    @torch.inference_mode(False)  # the caller may predict inside one
    def learn(self, labels: Tensor | None = None) -> None:
        """Adapt to the images of the last `answer`, unless already done; with labels (B,) if the method needs them."""
        answered, self._answered = self._answered, None
        if answered is None:
            return
        if self.objective.needs_labels and labels is None:
            raise ValueError("this method learns from labels, and none were given")
        images, targets = answered
        images = images.clone() if images.is_inference() else images  # inference tensors cannot be part of a graph
        labels = labels if self.objective.needs_labels else None
        self.last_views = self.objective.adapt(self._descent, images, labels, targets)

    @torch.no_grad()
    def predict(self, images: Tensor, fit: Tensor | None = None, *, share: float | None = None) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W), without adapting weights.

        The fit images (B,), by default none, update the centring. `share` interpolates the weights from the source's
        (0) to the adapted ones (1, the default); the images then update the source model's centring as well.
        """
        self._check_source()
        images = self.net.enter(images)
        fit = torch.zeros(len(images), dtype=torch.bool) if fit is None else fit
        self.net.expect(images, fit, for_both=share is not None)
        with contextlib.nullcontext() if share is None else self.net.weights.between(share):
            return self.objective.predict(images)

    @torch.no_grad()
    def predict_source(self, images: Tensor, fit: Tensor | None = None) -> Tensor:
        """Return logits (B, C) of the source weights, centred by their own means, which the fit images (B,) update."""
        images = self.net.enter(images)
        parts = images.split(self.objective.part_size(len(images)))
        return self.net.centred_source(images, torch.cat([self.net.source_logits(part) for part in parts]), fit)

    @torch.inference_mode(False)  # the caller may be inside one
    def reset(self, *, keeps_source: bool = False) -> None:
        """Restore the source weights, exactly, and forget everything learned, except perhaps the source's centring."""
        self._descent.restart(keeps_source=keeps_source)
        self._answered = self._answered and (self._answered[0], None)  # targets depend on the old weights

    def scale_lr(self, factor: float) -> None:
        """Multiply the config's learning rates from now on."""
        self._descent.optimizer.scale_lr(factor)

    def delta(self) -> dict[str, Tensor]:
        """Return adapted minus source weights, by parameter name; adding them restores the adapted ones exactly."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.committed[0].items()}

    @torch.inference_mode(False)
    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with nothing else learned; raise DeltaError if it does not fit the model."""
        self.net.weights.load(delta, num_updates)
        self.net.forget_stream()
        self._descent.forget()
        self._answered = self._answered and (self._answered[0], None)  # targets depend on the old weights

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, on the CPU, except statistics of source images."""
        state = {DELTA + name: tensor.cpu().clone() for name, tensor in self.net.weights.committed[0].items()}
        state[_UPDATES] = torch.tensor(self.num_updates)
        return {**state, **self.net.stream_state(), **self.objective.state(), **self._descent.optimizer.state()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned; raise DeltaError if it does not fit the model."""
        self.load_delta(within(DELTA, state), int(state[_UPDATES]))
        self.net.load_stream_state(state)
        self.objective.load_state(state)
        self._descent.optimizer.load_state(state)

    @torch.inference_mode(False)
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return what the method learns from preprocessed source images (B, 3, H, W); ValueError if there are none."""
        entered = map(self.net.enter, batches)
        first = next(entered, None)
        if first is None:
            raise ValueError("there are no source images to learn from")
        return self.objective.source_statistics(itertools.chain([first], entered))

    @torch.inference_mode(False)
    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with the tensors returned by `source_statistics`, of this or an equal model."""
        self.objective.use_source(statistics)
        self._has_source = True

    @property
    def adapts(self) -> bool:
        """True if batches change anything."""
        return self.objective.adapts

    @property
    def trains(self) -> bool:
        """True if it uses an optimizer, whose rate `scale_lr` changes."""
        return bool(self.objective.trained)

    @property
    def persists(self) -> bool:
        """True if its updates last beyond their batch."""
        return self.trains and self.objective.accumulates and not self.objective.config.episodic

    @property
    def norms_only(self) -> bool:
        """True if only normalisation weights change, so that a delta is small."""
        return self.objective.chosen in ("norms", "none")

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the adapted parameters, as in the classifier's `named_parameters()`."""
        return tuple(self.net.weights.parameters)

    @property
    def committed(self) -> Committed:
        """Delta and number of updates as of the last complete update; later updates do not modify them."""
        delta, num_updates = self.net.weights.committed
        return delta if self.objective.delta_refusal else self.net.with_offset(delta), num_updates

    @property
    def num_updates(self) -> int:
        """Number of updates made to the current weights."""
        return self.net.weights.committed[1]

    def _prepared(self, images: Tensor) -> Tensor:
        self._check_source()
        images = self.net.enter(images)
        if self.objective.config.episodic and self.objective.adapts:
            self.reset()
        self.net.batch_norms.warn_of_few(len(images))
        self.net.expect(images, torch.ones(len(images), dtype=torch.bool))
        return images

    def _check_source(self) -> None:
        if not self._has_source:
            raise UsageError(
                f"{type(self.objective).__name__} learns from clean images of the source domain first: name a folder "
                "of them with --source-data FOLDER, or give use_source what source_statistics returns"
            )


Method: TypeAlias = Updater[Any]
"""A method of any class."""


def build_method(name: str, model: nn.Module, config: MethodConfig | None = None) -> Method:
    """Set up a method of METHOD_TABLE on a model, which it adapts in place; with its default settings without a config.
    Raise UsageError if the method is unknown, or its settings do not suit the model; ModelError if the method cannot
    adapt the model.
    """
    check_method(name, METHOD_TABLE)
    config = config or method_config(name, {}, batch_size=DEFAULT_BATCH_SIZE)
    return Updater(model, config, METHOD_TABLE[name].objective)
