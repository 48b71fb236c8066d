"""The definition of a method: the loss of a batch, and optional hooks around the update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.net import Chosen, Net
from remtta.methods.optimizer import NamedOptimizer
from remtta.methods.settings.base import PUBLISHED, MethodConfig, Preset
from remtta.models.weights import within

Config = TypeVar("Config", bound=MethodConfig)

Targets = tuple[Tensor, ...]
"""Targets of a loss: tensors with one row per image."""

Loss = tuple[Tensor, Tensor, int]
"""Logits (L, B, C) of the views, the plain one first; the scalar loss; the number of images it averages over."""

_GENERATOR, _OWN = "generator", "own."

_log = logging.getLogger("remtta")


class Objective(Generic[Config]):
    """A method without the machinery of updates: its `loss`, and hooks that do nothing by default.

    Attributes:
        net: The model.
        config: The method's settings.
        trained: Tensors that the optimizer updates, by name: the adapted weights, or what learns in their place.
        memory: What the next update depends on besides weights, optimizer and random numbers, by name; saved in states.
            Initialised by `begin`.
        statistics: Statistics of source images; initially empty, and not part of states.
    """

    settings: ClassVar[type[MethodConfig]] = MethodConfig  # class of its config
    preset: ClassVar[Preset] = PUBLISHED  # how a method of another package runs unless told otherwise
    chosen: ClassVar[Chosen] = "norms"  # which weights adapt
    only_predicts: ClassVar[bool] = False  # uses the model's own forward pass, with source statistics in batch norms
    accumulates: ClassVar[bool] = True  # updates last to the next batch
    predicts_after: ClassVar[bool] = False  # the prediction comes from after the update
    needs_labels: ClassVar[bool] = False  # learns from true labels
    needs_source: ClassVar[bool] = False  # first needs clean images of the source domain
    num_models: ClassVar[int] = 1  # copies of the model's weights that it holds
    passes_per_step: tuple[float, float] = 1, 1  # forward and backward; the maximum if it depends on the image
    adapts: bool = True  # batches change something
    delta_refusal: str | None = None  # why what it learns cannot be saved as a delta
    max_source_images: int | None = None  # None for all

    def __init__(self, net: Net, config: Config) -> None:
        self.net, self.config = net, config
        self.trained: Mapping[str, Tensor] = net.weights.parameters
        self.memory: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}

    # What a method is.

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        """Return views, loss and count of images (B, 3, H, W), a batch or a part of one.

        If the loss has no gradient or the count is 0, none of these images is learned from.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return the targets of a whole batch for `loss`; by default the labels, if needed."""
        return () if labels is None else (labels,)

    # How it predicts.

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of images (B, 3, H, W), each independently of the others."""
        return self.net.logits(images)

    def output(self, logits: Tensor) -> Tensor:
        """Return the prediction (B, C) for a whole batch from its plain logits (B, C)."""
        return logits

    def predict(self, images: Tensor) -> Tensor:
        """Return the prediction (B, C) for a whole batch of images (B, 3, H, W), without adapting."""
        return self.output(self.in_parts(self.logits, images))

    def in_parts(self, predict: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return logits (B, C) of a whole batch that `predict` returns for at most a micro-batch, centred by the batch.

        Batch norms that use the batch's statistics need it whole.
        """
        size = len(images) if self.net.batch_norms.mixes else self.part_size(len(images))
        if size >= len(images):
            return predict(images)
        centre = self.net.centre  # its offset changes with the last part
        return torch.cat([predict(part) + centre.offset for part in images.split(size)]) - centre.offset

    @torch.no_grad()
    def note(self, images: Tensor) -> None:
        """Centre by a new batch, and count it in recent statistics, unless that is done; for use before other views."""
        if self.net.centre.waits or self.net.batch_norms.waits:
            for part in images.split(self.part_size(len(images))):
                self.logits(part)

    def answer(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        """Return the prediction (B, C) before an update, and the update's targets if already known."""
        return self.predict(images), None

    # How it adapts.

    def adapt(self, descent: Descent, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        """Adapt to a batch, and return the views (L, B, C) of its prediction, the plain one first."""
        return descent.batch(images, labels, targets)

    def gradients(self, descent: Descent, images: Tensor, targets: Targets) -> Tensor:
        """Compute a batch's gradients in `trained`, and return its views (L, B, C)."""
        return descent.gradients(images, targets)

    def before_step(self) -> None:
        """Use the gradients before the optimizer's step, which may overwrite them."""

    def after_step(self) -> None:
        """Change the weights after the optimizer's step, before they are committed."""

    def after_batch(self, views: Tensor) -> bool:
        """Process a batch's views (L, B, C) after its step; return whether to restore the source weights."""
        return False

    def part_size(self, batch_size: int) -> int:
        """Return the number of images of a batch that go forward and backward at a time."""
        return self.net.part_size(batch_size)

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for the optimizer, which may have their own learning rates."""
        return [{"params": list(self.trained.values())}]

    def passes(self) -> tuple[float, float]:
        """Return the number of forward and backward passes per image."""
        forward, backward = self.passes_per_step
        return forward * self.config.steps, backward * self.config.steps

    @property
    def num_trained(self) -> int:
        """Number of trained values: weights, or what learns in their place or beside them."""
        return sum(tensor.numel() for tensor in self.trained.values())

    # What it remembers.

    def begin(self) -> None:
        """Set `memory` as before the first batch; weights and optimizer are reset already."""
        self.memory = {}

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU of `memory` and of the random generator's state."""
        own = {_OWN + name: tensor.detach().cpu().clone() for name, tensor in self.memory.items()}
        return {_GENERATOR: self.net.generator.get_state(), **own}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned, among other entries; called after `begin`."""
        self.net.generator.set_state(state[_GENERATOR])
        own = within(_OWN, state)
        for name, known in self.memory.items():
            known.copy_(own.pop(name))  # in place, since an optimizer may hold it
        for name, tensor in own.items():
            self.memory[name] = tensor.to(self.net.device if tensor.ndim else "cpu", copy=True)

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return statistics on the CPU of one or more batches of clean source images (B, 3, H, W), for `use_source`."""
        raise UsageError(f"{type(self).__name__} learns nothing from source images")

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with the tensors returned by `source_statistics`, of this or an equal model."""
        self.statistics = {name: tensor.to(self.net.device) for name, tensor in statistics.items()}


class Descent:
    """Gradient descent on an objective's loss. A batch whose gradients are not finite is only predicted."""

    def __init__(self, objective: Objective[Any]) -> None:
        self._net, self._objective, self._config = objective.net, objective, objective.config
        self.optimizer = NamedOptimizer(objective.trained, self._config, objective.groups())

    @torch.enable_grad()
    def batch(self, images: Tensor, labels: Tensor | None, targets: Targets | None) -> Tensor:
        """Take all steps on a batch; return its views (L, B, C). `targets` are the first step's, if known."""
        views = []
        for _ in range(self._config.steps):
            targets = self._objective.targets(images, labels) if targets is None else targets
            views.append(self._objective.gradients(self, images, targets))
            if self.optimizer.gradients():
                self._apply()
            if self._objective.after_batch(views[-1]):
                self.restart(keeps_source=True)
            targets = None
        return views[-1 if self._config.answer == "last" else 0]

    def alone(self, backward: Callable[[], None]) -> bool:
        """Take all steps on one image, with gradients computed by `backward`; return whether it was adapted to."""
        for number in range(self._config.steps):
            self.optimizer.zero_grad()
            backward()
            if not self.optimizer.finite():
                _log.warning("an image gave gradients that are not finite numbers, and was not adapted to")
                return number > 0
            self.optimizer.step()
        return True

    def gradients(self, images: Tensor, targets: Targets) -> Tensor:
        """Compute a batch's gradients, or none if no image counts; return its views (L, B, C)."""
        self.optimizer.zero_grad()
        size = self._objective.part_size(len(images))
        whole = size >= len(images)
        if not whole:
            self._net.batch_norms.warn_of_parts()
            self._objective.note(images)  # the whole batch, before its first part is learned from
        views, num_counted = [], 0
        for start in range(0, len(images), size):
            part = slice(start, start + size)
            logits, loss, count = self._objective.loss(images[part], tuple(rows[part] for rows in targets))
            if logits.ndim != 3:  # of another package's method
                kind, shape = type(self._objective).__name__, tuple(logits.shape)
                raise UsageError(f"{kind}.loss must return logits of shape (L, B, C), got {shape}")
            if count and not loss.requires_grad:  # it may be 0, but then the logits have gradients
                self._net.check_gradients(logits)
            if count and loss.requires_grad:
                # The loss is a mean over images; sums over the parts add up to the batch's.
                self._net.backward(loss if whole else loss * count)
            num_counted += count
            views.append(logits.detach())
        if (gradients := self.optimizer.gradients()) and not whole:
            torch._foreach_div_(gradients, float(num_counted))
        return torch.cat(views, dim=1)

    def restart(self, *, keeps_source: bool) -> None:
        """Return to the source weights, with nothing learned, except perhaps the source's centring."""
        self.optimizer.zero_grad()  # the model outlives the method, and gradients are as large as weights
        self._net.weights.reset()
        self._net.forget_stream(keeps_source=keeps_source)
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Forget everything learned except the weights."""
        self.optimizer.restart()
        self._objective.begin()

    def _apply(self) -> None:
        if not self.optimizer.finite():
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")
            return
        self._objective.before_step()
        self.optimizer.step()
        self._objective.after_step()
        if self._config.anchor:
            self._net.weights.pull(self._config.anchor)
        self._net.batch_norms.follow()
        self._net.weights.commit()
