"""The base of all methods: predict a batch, then update by the gradients of its loss.

A method defines `loss`; most of the published ones define nothing else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.adapted_model import AdaptedModel, TrainedWeights
from remtta.methods.optimizer import NamedOptimizer
from remtta.methods.settings.base import PUBLISHED, MethodConfig, Preset
from remtta.models.preprocessing import Preprocessing
from remtta.models.weights import count_in, within

Config = TypeVar("Config", bound=MethodConfig, covariant=True)

Center = Callable[[Tensor], Tensor]
"""Centers the logits (..., C) of the adapted model; returns them unchanged if the method does not center."""

Targets = tuple[Tensor, ...]
"""Further arguments of a loss: tensors with one row per image."""

_DELTA, _UPDATES, _GENERATOR, _BUFFER = "delta.", "updates", "generator", "own."

_log = logging.getLogger(__name__)


class LossOutput(NamedTuple):
    """The result of a method's `loss`, which may also be a plain tuple."""

    views: Tensor  # their logits (L, B, C), the plain one first
    loss: Tensor  # a scalar
    num_images: int  # that it averages over


@dataclass
class _Batch:
    """Images that `predict` returned logits of, and that `step` will update by."""

    images: Tensor
    targets: Targets | None = None  # if they are known already
    views: Tensor | None = None  # if the gradients are computed already
    first_view: Targets | None = None  # with its graph, until the loss takes it


class Method(Generic[Config]):
    """A method on a model: `predict` returns logits, and `step` updates the weights by the same images.

    All logits are raw; the loss centers them by the function that it gets.

    Attributes:
        model: The model and its adapted weights.
        config: The method's settings.
        trained: Tensors that the optimizer updates, by name: the adapted weights, or what learns in their place.
        buffers: What the next update depends on besides weights, optimizer and random numbers, by name.
        last_views: Logits (L, B, C) of the last batch's views as in the loss, the plain one first; None before its
            update, and without one.
        source_logits: The source model's centered logits (B, C) of the batch to learn from, set by the pipeline before
            `predict`; None if only the adapted model predicts.
        adapts: False if batches change nothing.
        passes_per_step: Forward and backward passes per image; the maximum if it depends on the image.
        num_models: Number of copies of the model's weights held.
        delta_refusal: Reason why its updates cannot be saved as a delta; None if they can.
    """

    settings: ClassVar[type[MethodConfig]] = MethodConfig  # class of its config
    preset: ClassVar[Preset] = PUBLISHED  # default settings and guard of a method of another package

    trains: ClassVar[TrainedWeights] = "norms"  # the weights that adapt
    calls_module: ClassVar[bool] = False  # works with any classifier, by the module's own forward pass
    predicts_after_update: bool = False  # by `update_and_predict`: during or after the update on the same images
    persistent_updates: ClassVar[bool] = True  # they last beyond their batch
    needs_labels: ClassVar[bool] = False
    needs_source_data: ClassVar[bool] = False

    adapts: bool = True
    passes_per_step: tuple[float, float] = 1, 1
    num_models: int = 1
    delta_refusal: str | None = None

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        self.model, self.config = model, config
        self.trained: Mapping[str, Tensor] = model.weights.parameters
        self.buffers: dict[str, Tensor] = {}
        self.last_views: Tensor | None = None
        self.source_logits: Tensor | None = None
        self._batch: _Batch | None = None
        if config.predicts_last_step and not self.needs_labels:
            self.predicts_after_update = True

    # To be defined by a method.

    loss: Callable[..., LossOutput]
    """`loss(images, center)` returns the loss of images (B, 3, H, W), a batch or a part of one, and its views.

    If the loss has no gradient or the count is 0, none of these images is learned from. The result of `targets` follows
    as further arguments.
    """

    def update_and_predict(self, images: Tensor) -> Tensor:
        """Update by images (B, 3, H, W), and return their logits (B, C). Called instead of `forward` if
        `predicts_after_update`. By default the logits before the last of several steps; a method that overrides it
        needs no `loss`.
        """
        return self.update(images)[0]

    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return further arguments of `loss` for a whole batch; by default the labels, if the method needs them."""
        return () if labels is None else (labels,)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of images (B, 3, H, W), each independently of the others."""
        return self.model.logits(images)

    def output(self, logits: Tensor) -> Tensor:
        """Return the prediction (B, C) for a whole batch from its centered logits (B, C)."""
        return logits

    def before_step(self) -> None:
        """Use the gradients before the optimizer's step, which may overwrite them."""

    def after_step(self) -> None:
        """Change the weights after the optimizer's step, before they are committed."""

    def after_batch(self, views: Tensor) -> bool:
        """Process a batch's views (L, B, C) after its step; return whether to restore the source weights."""
        return False

    # A batch: predict, then step.

    @torch.inference_mode(False)  # the caller may predict inside one
    @torch.no_grad()
    def predict(self, images: Tensor, *, learn: bool = False, counted: bool = True, latency: bool = False) -> Tensor:
        """Return logits (B, C) of transformed images (B, 3, H, W), from before the update; without gradient.

        Args:
            images: As returned by `AdaptedModel.transform`.
            learn: `step` follows and may reuse what is computed here.
            counted: They count in the recent statistics of batch norms.
            latency: Return as early as possible, even if `step` takes longer then.
        """
        self._batch = self.last_views = None
        self.model.batch_norms.begin_batch(len(images) if counted else 0)
        if not learn:
            return self.in_parts(self.forward, images)
        images = images.clone() if images.is_inference() else images  # inference tensors cannot be part of a graph
        self.model.batch_norms.warn_of_few(len(images))
        if self.predicts_after_update:
            logits = self.update_and_predict(images)
            name = f"what {type(self).__name__}.update_and_predict returns"
            _check_logits(name, logits, (len(images), self.model.num_classes))
            return logits
        batch = self._batch = _Batch(images)
        if not (self.config.center or latency or self.needs_labels):  # the loss needs nothing else
            batch.views = self.compute_gradients(images, unchanged, *self.targets(images, None))
            return batch.views[0]
        if not latency and self.keeps_graph(len(images)):
            with torch.enable_grad():
                batch.first_view = self.first_view(images)
            return batch.first_view[0].detach()
        logits, batch.targets = self.predict_with_targets(images)
        return logits

    @torch.inference_mode(False)
    def step(self, center: Center, labels: Tensor | None = None) -> bool:
        """Update by the images of the last `predict`, unless it did; return whether the source weights were restored.

        Raise ValueError if the method needs labels (B,) and gets none.
        """
        batch, restored = self._batch, False
        if batch is None:
            return False
        if self.needs_labels and labels is None:
            raise ValueError("this method learns from labels, and none were given")
        labels = labels if self.needs_labels else None
        for number in range(self.config.steps):
            if batch.views is None or number:
                targets = self.targets(batch.images, labels) if batch.targets is None else batch.targets
                batch.views, batch.targets = self.compute_gradients(batch.images, center, *targets), None
            if number == 0 or self.config.prediction_step == "last":
                self.last_views = batch.views
            if self.optimizer.gradients():
                self._update_weights()
            if self.after_batch(batch.views):
                self.reset()
                restored = True
        self._batch = None
        return restored

    def update(self, images: Tensor) -> Tensor:
        """Take all steps on a batch, without centering; return the views (L, B, C) of the first or last step."""
        self._batch = _Batch(images)
        self.step(unchanged)
        assert self.last_views is not None
        return self.last_views

    @torch.enable_grad()
    def compute_gradients(self, images: Tensor, center: Center, *targets: Tensor) -> Tensor:
        """Compute a batch's gradients, or none if no image counts; return its views (L, B, C).

        A batch of more than `part_size` images goes in parts, for less memory; the gradients are the same. Raise
        UsageError if `loss` is not as described, or ModelError if the model has no gradients.
        """
        self.optimizer.zero_grad()
        size = self.part_size(len(images))
        whole = size >= len(images)
        parts = [images] if whole else images.split(size)
        if not whole:
            self._see_whole_batch(parts)
        all_views, num_counted = [], 0
        for part, *rows in zip(parts, *([each] if whole else each.split(size) for each in targets), strict=True):
            views, loss, count = self._check_loss(part, self.loss(part, center, *rows))
            if count and loss.requires_grad:  # the loss is a mean; sums over the parts add up to the batch's
                self.model.backward(loss if whole else loss * count)
            num_counted += count
            all_views.append(views)
        if not whole and (gradients := self.optimizer.gradients()):
            torch._foreach_div_(gradients, float(num_counted))
        return all_views[0] if whole else torch.cat(all_views, dim=1)

    @torch.no_grad()
    def _see_whole_batch(self, parts: Iterable[Tensor]) -> None:
        """Let batch norms see the plain views of a whole batch, if their recent statistics wait for them."""
        self.model.batch_norms.warn_of_parts()
        if self.model.batch_norms.waits:  # the statistics are not those of masked views
            for part in parts:
                self.forward(part)

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) for a loss; those that `predict` computed of the same images, if it kept their graph."""
        return self.take_first_view(images)[0]

    def first_view(self, images: Tensor) -> Targets:
        """Return the plain view's logits (B, C), and what else the loss reuses of its forward pass."""
        return (self.forward(images),)

    def take_first_view(self, images: Tensor) -> Targets:
        """Return `first_view`, as kept by `predict` or computed now."""
        batch = self._batch
        if batch is None or batch.images is not images or batch.first_view is None:
            return self.first_view(images)
        first_view, batch.first_view = batch.first_view, None
        return first_view

    def keeps_graph(self, batch_size: int) -> bool:
        """Return whether a batch is small enough to keep the graph of its forward pass until `step`.

        Saves a forward pass: a third of the time of Tent's update on a ViT.
        """
        return self.part_size(batch_size) >= batch_size

    def predict_with_targets(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        """Return logits (B, C) without a graph, and the loss's `targets` if they are a by-product."""
        return self.in_parts(self.forward, images), None

    def in_parts(self, predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return logits (B, C) that `predict` returns for parts; batch norms that mix images need the whole batch."""
        size = len(images) if self.model.batch_norms.mixes else self.part_size(len(images))
        return predict(images) if size >= len(images) else torch.cat([predict(part) for part in images.split(size)])

    def _check_loss(self, images: Tensor, returned: LossOutput) -> LossOutput:
        """Return what `loss` returned of images, with views without gradients, if it is as described."""
        name = f"{type(self).__name__}.loss"
        _check_returned(name, returned, (len(images), self.model.num_classes))
        views, loss, count = returned
        if count and not loss.requires_grad and (loss or not views.requires_grad):  # a zero loss may have no graph
            self.model.check_gradients(self.model.logits(images))
            raise UsageError(f"the loss of {name} has no gradient; compute it from logits that are not detached")
        return LossOutput(views.detach(), loss, count)

    def _update_weights(self) -> None:
        if not self.optimizer.has_finite_gradients():
            _log.warning("skipped a batch: its gradients are not finite")
            return
        self.before_step()
        self.optimizer.step()
        self.after_step()
        if self.config.anchor:
            self.model.weights.pull(self.config.anchor)
        self.model.batch_norms.set_running_statistics()
        self.model.weights.commit()

    # The optimizer, and the adaptation state that is saved and reset together.

    @cached_property
    def optimizer(self) -> NamedOptimizer:
        return NamedOptimizer(self.trained, self.config, self.parameter_groups())

    def parameter_groups(self) -> list[dict[str, object]]:
        """Return parameter groups for the optimizer, which may have their own learning rates."""
        return [{"params": list(self.trained.values())}]

    def use_most_memory(self) -> None:
        """Force the worst-case memory path for the next update; the caller restores the state."""

    def reset_buffers(self) -> None:
        """Set `buffers` as before the first batch; the weights are reset already."""
        self.buffers = {}

    @torch.inference_mode(False)  # the caller may be inside one
    def reset(self) -> None:
        """Restore the source weights, exactly, and everything else as before the first batch."""
        self.optimizer.zero_grad()  # the model outlives the method, and gradients are as large as weights
        self.model.reset()
        self.reset_learned()

    @torch.no_grad()
    def reset_learned(self) -> None:
        """Forget everything learned except the weights."""
        self.optimizer.restart()
        self.reset_buffers()

    @torch.inference_mode(False)
    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with nothing else learned; raise DeltaError if it does not fit the model."""
        self.model.weights.load(delta, num_updates)
        self.model.batch_norms.forget()
        self.reset_learned()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, on the CPU, except statistics of source images."""
        delta, num_updates = self.model.weights.committed
        state = {_DELTA + name: tensor.cpu().clone() for name, tensor in delta.items()}
        state[_UPDATES] = torch.tensor(num_updates)
        return {**state, **self.model.batch_norms.state(), **self.extra_state(), **self.optimizer.state_dict()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; raise DeltaError if it does not fit the model."""
        self.load_delta(within(_DELTA, state), count_in(state, _UPDATES))
        self.model.batch_norms.load_state(state)
        self.load_extra_state(state)
        self.optimizer.load_state_dict(state)

    def extra_state(self) -> dict[str, Tensor]:
        """Return copies on the CPU of `buffers` and of the random generator's state."""
        buffers = {_BUFFER + name: tensor.detach().cpu().clone() for name, tensor in self.buffers.items()}
        return {_GENERATOR: self.model.generator.get_state(), **buffers}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `extra_state` returned, among other entries."""
        self.model.generator.set_state(state[_GENERATOR])
        saved = within(_BUFFER, state)
        for name, buffer in self.buffers.items():
            buffer.copy_(saved.pop(name))  # in place, since an optimizer may hold it
        for name, tensor in saved.items():
            self.buffers[name] = tensor.to(self.model.device if tensor.ndim else "cpu", copy=True)

    def learn_from_source(
        self,
        source_data: str | Path,
        *,
        name: str,
        preprocessing: Preprocessing | None = None,
        fitting_as_they_are: bool = False,
        wait: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Learn from clean source images before the first batch, if `needs_source_data`; return it for the records.

        Args:
            source_data: A folder of images without labels, or a file that an earlier run computed from one.
            name: Name of the method, for messages and the cache.
            preprocessing: By default the model's own.
            fitting_as_they_are: Images of the input size are neither resized nor cropped.
            wait: Called while images are decoded; may raise to stop.
        """
        raise UsageError(f"{name} learns nothing from source images")

    @property
    def log_classes(self) -> float:
        """Entropy of a uniform prediction, in nats."""
        return math.log(self.model.num_classes)

    @property
    def num_updates(self) -> int:
        return self.model.weights.committed[1]

    @property
    def num_trained(self) -> int:
        """Number of trained values: weights, or what learns in their place or beside them."""
        return sum(tensor.numel() for tensor in self.trained.values())

    def part_size(self, batch_size: int) -> int:
        """Return the number of images of a batch that go forward and backward at a time."""
        return self.model.part_size(batch_size)

    def passes(self) -> tuple[float, float]:
        """Return the number of forward and backward passes per image."""
        forward, backward = self.passes_per_step
        return forward * self.config.steps, backward * self.config.steps

    @property
    def keeps_updates(self) -> bool:
        """True if updates by gradients last to the next batch."""
        return bool(self.trained) and self.persistent_updates and not self.config.episodic

    @property
    def norms_only(self) -> bool:
        """True if only normalisation weights change, so that a delta is small."""
        return self.trains in ("norms", "none")


def _check_returned(name: str, returned: object, batch: tuple[int, int]) -> None:
    """Raise UsageError if this is not what the loss of a batch (B, C) is to return."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise UsageError(f"{name} must return views, loss and count, got {_described(returned)}")
    views, loss, count = returned
    _check_logits(f"the views of {name}", views, ("L", *batch))
    if not (isinstance(loss, Tensor) and not loss.shape and loss.is_floating_point()):
        raise UsageError(f"the loss of {name} must be a tensor of one number, got {_described(loss)}")
    if type(count) is not int or count < 0:
        raise UsageError(f"the count of {name} must be a number of images, got {_described(count)}")


def _check_logits(name: str, logits: object, shape: tuple[int | str, ...]) -> None:
    """Raise UsageError if logits do not have this shape, in which a letter stands for any number."""
    sizes = logits.shape if isinstance(logits, Tensor) else ()
    if len(sizes) != len(shape) or any(of not in (size, "L") for of, size in zip(shape, sizes, strict=True)):
        shown = ", ".join(map(str, shape))
        raise UsageError(f"{name} must be logits of shape ({shown}), got {_described(logits)}")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value}"[:60]


def unchanged(logits: Tensor) -> Tensor:
    """The `Center` of a method that does not center logits."""
    return logits
