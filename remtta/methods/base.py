"""The base of all methods: predict a batch, then update by the gradients of its loss.

A method defines `loss`; most of the published ones define nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from remtta.errors import UsageError, check
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.settings.base import MethodConfig
from remtta.methods.state import Config, MethodState

Center = Callable[[Tensor], Tensor]
"""Centers the logits (..., C) of the adapted model; returns them unchanged if the method does not center."""

Targets = tuple[Tensor, ...]
"""Further arguments of a loss: tensors with one row per image."""

Loss = tuple[Tensor, Tensor, int]
"""Logits (L, B, C) of the views, the plain one first; the scalar loss; the number of images that it averages over."""

_log = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Images that `predict` returned logits of, and that `step` will update by."""

    images: Tensor
    targets: Targets | None = None  # if they are known already
    views: Tensor | None = None  # if the gradients are computed already
    first_view: Targets | None = None  # with its graph, until the loss takes it


class Method(MethodState[Config]):
    """A method on a model: `predict` returns logits, and `step` updates the weights by the same images.

    All logits are raw; the loss centers them by the function that it gets.

    Attributes:
        last_views: Logits (L, B, C) of the last batch's views as in the loss, the plain one first; None before its
            update, and without one.
        source_logits: The source model's centered logits (B, C) of the batch to learn from, set by the pipeline before
            `predict`; None if only the adapted model predicts.
    """

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        self.last_views: Tensor | None = None
        self.source_logits: Tensor | None = None
        self._batch: _Batch | None = None

    # To be defined by a method.

    loss: Callable[..., Loss]
    """`loss(images, center)` returns views, loss and count of images (B, 3, H, W), a batch or a part of one.

    If the loss has no gradient or the count is 0, none of these images is learned from. The result of `targets` follows
    as further arguments.
    """

    update_and_predict: Callable[[Tensor], Tensor]
    """Returns logits (B, C) from after an update by the same images; instead of `loss`, if `predicts_after_update`."""

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
        if self.needs_source_data and not self.statistics:
            raise UsageError(
                f"{type(self).__name__} learns from clean images of the source domain first: name a folder "
                "of them with --source-data FOLDER, or give use_source what learn_source returns"
            )
        if learn and self.config.episodic and self.adapts:
            self.reset()
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
        if self.config.predicts_last_step and not self.needs_labels:
            return self.update(images)[0]
        if not (self.config.centre or latency or self.needs_labels):  # nothing else is needed for the gradients
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
            if number == 0 or self.config.answer == "last":
                self.last_views = batch.views
            if self.optimizer.gradients():
                self._update_weights()
            if self.after_batch(batch.views):
                self.reset()
                restored = True
        self._batch = self.source_logits = None
        return restored

    def update(self, images: Tensor) -> Tensor:
        """Take all steps on a batch, without centering; return the views (L, B, C) of the first or last step."""
        self._batch = _Batch(images)
        self.step(unchanged)
        assert self.last_views is not None
        return self.last_views

    @torch.enable_grad()
    def compute_gradients(self, images: Tensor, center: Center, *targets: Tensor) -> Tensor:
        """Compute a batch's gradients, or none if no image counts; return its views (L, B, C)."""
        self.optimizer.zero_grad()
        size = self.part_size(len(images))
        if size < len(images):
            return _gradients_in_parts(self, size, images, center, *targets)
        views, loss, count = self.checked_loss(images, center, *targets)
        if count and loss.requires_grad:
            self.model.backward(loss)
        return views

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

    def checked_loss(self, images: Tensor, center: Center, *targets: Tensor) -> Loss:
        """Return `loss`, with views without gradients; raise UsageError if it is not as described, or ModelError if the
        model has no gradients.
        """
        name, returned = f"{type(self).__name__}.loss", self.loss(images, center, *targets)
        _check_returned(name, returned, (len(images), self.model.num_classes))
        views, loss, count = returned
        if count and not loss.requires_grad and (loss or not views.requires_grad):  # without, 0 changes nothing
            self.model.check_gradients(self.model.logits(images))
            raise UsageError(f"the loss of {name} has no gradient; compute it from logits that are not detached")
        return views.detach(), loss, count

    def _update_weights(self) -> None:
        if not self.optimizer.has_finite_gradients():
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")
            return
        self.before_step()
        self.optimizer.step()
        self.after_step()
        if self.config.anchor:
            self.model.weights.pull(self.config.anchor)
        self.model.batch_norms.set_running_statistics()
        self.model.weights.commit()


def _gradients_in_parts(
    method: Method[MethodConfig], size: int, images: Tensor, center: Center, *targets: Tensor
) -> Tensor:
    """Compute a batch's gradients from parts of at most `size` images, in less memory; return its views (L, B, C)."""
    batch_norms = method.model.batch_norms
    batch_norms.warn_of_parts()
    if batch_norms.waits:  # recent statistics are those of the plain views of the whole batch, not of masked ones
        with torch.no_grad():
            for part in images.split(size):
                method.forward(part)
    all_views, num_counted = [], 0
    for part, *rows in zip(images.split(size), *(tensor.split(size) for tensor in targets), strict=True):
        views, loss, count = method.checked_loss(part, center, *rows)
        if count and loss.requires_grad:  # the loss is a mean; sums over the parts add up to the batch's
            method.model.backward(loss * count)
        num_counted += count
        all_views.append(views)
    if gradients := method.optimizer.gradients():
        torch._foreach_div_(gradients, float(num_counted))
    return torch.cat(all_views, dim=1)


def _check_returned(name: str, returned: object, batch: tuple[int, int]) -> None:
    """Raise UsageError if this is not what the loss of a batch (B, C) is to return."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise UsageError(f"{name} must return views, loss and count, got {_described(returned)}")
    views, loss, count = returned
    _check_logits(f"the views of {name}", views, ("L", *batch))
    is_number = isinstance(loss, Tensor) and not loss.shape and loss.is_floating_point()
    check(is_number, f"the loss of {name}", _described(loss), "a tensor of one number")
    check(type(count) is int and count >= 0, f"the count of {name}", _described(count), "a number of images")


def _check_logits(name: str, logits: object, shape: tuple[int | str, ...]) -> None:
    """Raise UsageError if logits do not have this shape, in which a letter stands for any number."""
    sizes = logits.shape if isinstance(logits, Tensor) else ()
    fits = len(sizes) == len(shape) and all(of in (size, "L") for of, size in zip(shape, sizes, strict=True))
    check(fits, name, _described(logits), f"logits of shape ({', '.join(map(str, shape))})")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value}"[:60]


def unchanged(logits: Tensor) -> Tensor:
    """The `Center` of a method that does not center logits."""
    return logits
