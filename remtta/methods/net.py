"""The model that a method adapts: frozen, but for the weights that were chosen."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from remtta.backbones.backbone import Backbone, BatchNorm
from remtta.backbones.batchnorm import BatchStatistics, batch_norms, running_statistics
from remtta.backbones.families import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError
from remtta.methods.augmentations import PixelSpace
from remtta.methods.settings.base import MethodConfig
from remtta.models.precision import Context, ForwardContext
from remtta.models.weights import AdaptedWeights

Chosen = Literal["norms", "layers", "all", "none"]
"""Which weights adapt: the norms that `adapt_layers` chooses, those of layers, every weight, or none."""

Value = TypeVar("Value", bound=Tensor)


class Net:
    """A classifier in eval mode, its adapted weights, and what its forward passes need.

    Attributes:
        model: The classifier, in its wrappers.
        backbone: The same as methods see it.
        weights: The adapted weights, their source values and their delta.
        batch_norms: What the batch norms normalise by.
        generator: Where a method's random numbers come from.
        micro_batch: Most images per forward and backward pass; None for the whole batch.

    Raises:
        ModelError: If the model cannot be adapted, with the reason; `any_model` takes any, only to predict by it.
    """

    def __init__(
        self, model: nn.Module, config: MethodConfig, chosen: Chosen = "norms", *, any_model: bool = False
    ) -> None:
        self.backbone = cast(Backbone, _AnyClassifier(model)) if any_model else backbone_of(model)
        if self.backbone.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        module, norms = self.backbone.module, self.backbone.batch_norms
        named = _chosen_weights(self.backbone, config, chosen)
        moving = running_statistics(norms) if config.bn_momentum else {}
        self.model = model.eval().requires_grad_(False)
        everything = {**dict(module.named_parameters()), **running_statistics(batch_norms(module))}
        self.weights = AdaptedWeights(named, everything, moving)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.micro_batch = config.micro_batch
        self._config = config
        self._source_context: Context = ForwardContext(module, config.precision)
        self.normalise(norms)

    def normalise(self, norms: Mapping[str, BatchNorm]) -> None:
        """Have these batch norms, by name, normalise as the config says."""
        self.batch_norms = BatchStatistics(norms, self._config.bn, self._config.bn_prior)
        self.context = self.batch_norms.around(self._source_context)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.device

    @property
    def num_classes(self) -> int:
        """Classes C of the head."""
        return self.backbone.num_classes

    @functools.cached_property
    def pixels(self) -> PixelSpace:
        """The way from preprocessed images to pixels in [0, 1] and back."""
        return PixelSpace(self.backbone.module)

    def head(self, logits: Tensor) -> Tensor:
        """Turn what the classifier returns into logits (..., C), float32.

        Every logit that a loss or an answer sees passes here, those of masked views, too.
        """
        return logits.float()

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W)."""
        with self.context(images.device):
            logits = self.backbone.logits(images)
        return self.head(logits)

    def source_logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of the source weights; batch norms have the source's statistics."""
        with self.weights.at_source(), self._source_context(images.device):
            return self.backbone.logits(images).float()

    def part_size(self, batch_size: int) -> int:
        """Return how many images of a batch go through at a time."""
        return min(self.micro_batch or batch_size, batch_size)


class _AnyClassifier:
    """A classifier of unknown architecture as a backbone: it has logits and nothing else."""

    input_size = None
    num_classes = 2  # at least: it is not asked

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.batch_norms: dict[str, BatchNorm] = {}

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.module(images)
        return logits


def _chosen_weights(backbone: Backbone, config: MethodConfig, chosen: Chosen) -> dict[str, nn.Parameter]:
    if chosen == "none":
        return {}
    if chosen == "norms":
        return adapted_norms(backbone, config.adapt_layers)
    named = dict(backbone.module.named_parameters())
    return named if chosen == "all" else of_layers(named)


def of_layers(named: Mapping[str, Value]) -> dict[str, Value]:
    """Return those called weight or bias: not position embeddings, the class token and layer scales."""
    return {name: tensor for name, tensor in named.items() if name.rpartition(".")[2] in ("weight", "bias")}
