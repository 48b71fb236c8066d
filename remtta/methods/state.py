"""A method's facts, and its state between batches: weights, optimizer, buffers, and how they are saved and reset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.adapted_model import AdaptedModel, TrainedWeights
from remtta.methods.optimizer import NamedOptimizer
from remtta.methods.settings.base import PUBLISHED, MethodConfig, Preset
from remtta.models.weights import count_in, within

Config = TypeVar("Config", bound=MethodConfig, covariant=True)

_DELTA, _UPDATES, _GENERATOR, _BUFFER = "delta.", "updates", "generator", "own."


class MethodState(Generic[Config]):
    """The state of a method on a model.

    Attributes:
        model: The model and its adapted weights.
        config: The method's settings.
        trained: Tensors that the optimizer updates, by name: the adapted weights, or what learns in their place.
        buffers: What the next update depends on besides weights, optimizer and random numbers, by name.
        statistics: Statistics of source images; empty until `use_source`, and not part of the state.
        adapts: False if batches change nothing.
        passes_per_step: Forward and backward passes per image; the maximum if it depends on the image.
        num_models: Number of copies of the model's weights held.
        delta_refusal: Reason why its updates cannot be saved as a delta; None if they can.
        max_source_images: Number of source images used at most; None for all.
    """

    settings: ClassVar[type[MethodConfig]] = MethodConfig  # class of its config
    preset: ClassVar[Preset] = PUBLISHED  # default settings and guard of a method of another package

    trains: ClassVar[TrainedWeights] = "norms"  # the weights that adapt
    calls_module: ClassVar[bool] = False  # works with any classifier, by the module's own forward pass
    predicts_after_update: ClassVar[bool] = False  # `update_and_predict` predicts
    updates_last: ClassVar[bool] = True  # beyond their batch
    needs_labels: ClassVar[bool] = False
    needs_source_data: ClassVar[bool] = False

    adapts: bool = True
    passes_per_step: tuple[float, float] = 1, 1
    num_models: int = 1
    delta_refusal: str | None = None
    max_source_images: int | None = None

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        self.model, self.config = model, config
        self.trained: Mapping[str, Tensor] = model.weights.parameters
        self.buffers: dict[str, Tensor] = {}
        self.statistics: Mapping[str, Tensor] = {}

    @cached_property
    def optimizer(self) -> NamedOptimizer:
        return NamedOptimizer(self.trained, self.config, self.parameter_groups())

    def parameter_groups(self) -> list[dict[str, object]]:
        """Return parameter groups for the optimizer, which may have their own learning rates."""
        return [{"params": list(self.trained.values())}]

    def use_most_memory(self) -> None:
        """Let the next update take as much memory as any; the caller restores the state."""

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

    @torch.inference_mode(False)
    def learn_source(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return what the method learns from preprocessed source images (B, 3, H, W), for `use_source`; raise
        ValueError if there are none.
        """
        transformed = map(self.model.transform, batches)
        first = next(transformed, None)
        if first is None:
            raise ValueError("there are no source images to learn from")
        return self.source_statistics(itertools.chain([first], transformed))

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return statistics on the CPU of one or more batches of transformed source images (B, 3, H, W)."""
        raise UsageError(f"{type(self).__name__} learns nothing from source images")

    @torch.inference_mode(False)
    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with the tensors returned by `learn_source`, of this or an equal model."""
        self.statistics = {name: tensor.to(self.model.device) for name, tensor in statistics.items()}

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
        return bool(self.trained) and self.updates_last and not self.config.episodic

    @property
    def norms_only(self) -> bool:
        """True if only normalisation weights change, so that a delta is small."""
        return self.trains in ("norms", "none")
