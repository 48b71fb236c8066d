"""The model that a method adapts: frozen, except for the weights that the method trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from remtta.backbones.backbone import Backbone, BatchNorm, check_images
from remtta.backbones.batchnorm import BatchStatistics, batch_norms, running_statistics, uses_batches
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError
from remtta.methods.pixels import PixelSpace, patch_grid, shuffle_patches
from remtta.methods.settings.base import MethodConfig
from remtta.models.precision import ForwardContext
from remtta.models.preprocessing import preprocessing_of
from remtta.models.unwrapping import unwrap_model
from remtta.models.weights import AdaptedWeights

TrainedWeights = Literal["norms", "layers", "all", "none"]
"""The weights that adapt: norms selected by `adapt_layers`, weights and biases of layers, all weights, or none."""


class AdaptedModel:
    """A classifier in eval mode, its adapted weights, and the context of its forward passes.

    All its logits are raw: as the classifier returns them, in float32. Raise ModelError if the model cannot be adapted;
    the message gives the reason.

    Attributes:
        model: The classifier, in its wrappers.
        backbone: The interface of methods to it.
        input_transform: The part of its wrappers that changes images; None if there is none.
        weights: The adapted weights, their source values and their delta.
        batch_norms: The statistics that batch norms use.
        generator: The method's random generator.
        precision: "bf16" for matrix products in bf16; any other for fp32.
        micro_batch: Maximum number of images per forward and backward pass; None for the whole batch.
        biases: Names of the classifier's biases (C,): one, two if distilled, or none.

    Args:
        calls_module: Predict by the module's own forward pass, which works with any classifier.
    """

    def __init__(
        self, model: nn.Module, config: MethodConfig, trains: TrainedWeights = "norms", *, calls_module: bool = False
    ) -> None:
        self.input_transform = unwrap_model(model).front
        self.model = model.eval()  # also while its layers are found
        self.backbone = backbone_of(model)
        if self.backbone.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        module, norms = self.backbone.module, self.backbone.batch_norms
        self._forward = self.backbone.forward if calls_module else self.backbone.logits
        parameters = _trained_weights(self.backbone, config, trains)
        moving = running_statistics(norms) if config.bn == "recent" else {}
        model.requires_grad_(False)
        statistics = running_statistics(batch_norms(module))
        self._source_statistics = [(tensor, tensor.clone()) for tensor in statistics.values()]
        everything = {**dict(module.named_parameters()), **statistics}
        self.weights = AdaptedWeights(parameters, everything, moving)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.micro_batch = config.micro_batch
        self.biases = _head_biases(self.backbone)
        self._config = config
        self.use_precision(config.precision)
        self.use_batch_norms(norms)

    def use_batch_norms(self, norms: Mapping[str, BatchNorm]) -> None:
        """Let these batch norms, by name, normalise as configured."""
        mixes, config = uses_batches(self.backbone.module), self._config
        self.batch_norms = BatchStatistics(norms, config.bn, config.bn_prior, mixes=mixes)

    def use_precision(self, precision: str) -> None:
        self.precision, self._source_context = precision, ForwardContext(self.backbone.module, precision)

    @torch.no_grad()
    def reset(self) -> None:
        """Restore the source weights and running statistics, bit for bit."""
        self.weights.reset()
        for tensor, source in self._source_statistics:  # which the caller may have changed in training mode
            tensor.copy_(source)
        self.batch_norms.forget()

    @contextlib.contextmanager
    def context(self, device: torch.device) -> Iterator[None]:
        """Run forward passes on a device in the precision, and with the batch norms' statistics, as configured."""
        with self._source_context(device), self.batch_norms if self.batch_norms.mixes else contextlib.nullcontext():
            yield

    @property
    def device(self) -> torch.device:
        return next(self.backbone.module.parameters()).device

    @cached_property
    def num_classes(self) -> int:
        return self.backbone.num_classes

    @cached_property
    def pixels(self) -> PixelSpace:
        """The conversion between preprocessed images and pixels in [0, 1]."""
        preprocessing = preprocessing_of(self.model)
        if self.input_transform is None:
            return PixelSpace(preprocessing.mean, preprocessing.std)
        return PixelSpace(*self.input_transform.normalisation(preprocessing.input_size))

    def transform(self, images: Tensor) -> Tensor:
        """Return the input of the classifier inside its wrappers, for images (B, 3, H, W); raise ValueError if this is
        no batch of valid images.
        """
        check_images(images, self.backbone.input_size if self.input_transform is None else None)
        images = images.detach()  # whatever they were computed of is the caller's
        if any(layer.training for layer in self.model.modules()):  # the caller may have called train() since
            self.model.eval()
        return images if self.input_transform is None else self.input_transform(images)

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of images (B, 3, H, W)."""
        with self.context(images.device):
            return self._forward(images).float()

    def source_logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of the source weights; batch norms have the source's statistics."""
        with self.weights.at_source(), self._source_context(images.device):
            return self._forward(images).float()

    def shuffle_patches(self, images: Tensor, indices: Tensor) -> Tensor:
        """Return the images (B, 3, H, W) at indices (K,) with their patches shuffled."""
        grid = patch_grid(images.shape[2:], self.backbone.patch_size)
        return shuffle_patches(images[indices.to(images.device)], grid, torch.Generator().manual_seed(0))

    def check_gradients(self, logits: Tensor) -> Tensor:
        """Return logits that a loss is computed from; raise ModelError if they have no gradients."""
        if not logits.requires_grad:
            name = type(self.backbone.module).__name__
            raise ModelError(
                f"the logits of {name} have no gradients, so nothing can be learned: its forward runs under "
                "torch.no_grad or inference_mode, or detaches; change that, or use the method fast, which needs none"
            )
        return logits

    def backward(self, result: Tensor, gradient: Tensor | None = None) -> None:
        """Compute gradients of a loss, or of a result with its gradient; raise ModelError under checkpointing."""
        try:
            result.backward(gradient)
        except CheckpointError as error:
            name = type(self.backbone.module).__name__
            raise ModelError(f"{name} cannot be adapted with gradient checkpointing; turn it off") from error

    def part_size(self, batch_size: int) -> int:
        """Return the number of images of a batch that are processed at a time."""
        return min(self.micro_batch or batch_size, batch_size)

    def shift_biases(self, delta: Mapping[str, Tensor], offset: Tensor) -> Mapping[str, Tensor]:
        """Return a delta of weights with an offset (C,) of the logits subtracted from the head's biases."""
        if not offset.ndim:
            return delta
        return {**delta, **{name: delta.get(name, torch.zeros_like(offset)) - offset for name in self.biases}}


def _trained_weights(backbone: Backbone, config: MethodConfig, trains: TrainedWeights) -> dict[str, nn.Parameter]:
    if trains == "none":
        return {}
    if trains == "norms":
        return adapted_norms(backbone, config.adapt_layers)
    parameters = dict(backbone.module.named_parameters())
    if trains == "all":
        return parameters
    # Not position embeddings, the class token and layer scales.
    return {name: each for name, each in parameters.items() if name.rpartition(".")[2] in ("weight", "bias")}


def _head_biases(backbone: Backbone) -> list[str]:
    """Return the names of a classifier's biases (C,), or of the last layer in it."""
    found = []
    for prefix, classifier in backbone.classifiers.items():
        shapes = {name: parameter.shape for name, parameter in classifier.named_parameters(prefix=prefix)}
        found += [name for name in shapes if name.endswith(".bias") and shapes[name] == (backbone.num_classes,)][-1:]
    return found
