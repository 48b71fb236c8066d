"""The model that a method adapts: frozen, except for the chosen weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from remtta.backbones.backbone import Backbone, BatchNorm, check_images
from remtta.backbones.batchnorm import BatchStatistics, batch_norms, running_statistics, uses_batches
from remtta.backbones.families import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import ModelError
from remtta.methods.augmentations import PixelSpace, shuffle_patches
from remtta.methods.centring import Centre
from remtta.methods.settings.base import MethodConfig
from remtta.models.precision import ForwardContext
from remtta.models.preprocessing import preprocessing_of
from remtta.models.unwrapping import unwrap_model
from remtta.models.weights import AdaptedWeights, within

Chosen = Literal["norms", "layers", "all", "none"]
"""The weights that adapt: norms selected by `adapt_layers`, weights and biases of layers, all weights, or none."""


class Net:
    """A classifier in eval mode, its adapted weights, and the context of its forward passes; raise ModelError if the
    model cannot be adapted; the message gives the reason.

    Attributes:
        model: The classifier, in its wrappers.
        backbone: The interface of methods to it.
        front: The part of its wrappers that changes images; None if there is none.
        weights: The adapted weights, their source values and their delta.
        batch_norms: The statistics that batch norms use.
        generator: The method's random generator.
        micro_batch: Maximum number of images per forward and backward pass; None for the whole batch.
        centred: Whether logits are centred.
        centre: The offset of the adapted model's logits; 0 if they are not centred.
        source_centre: The offset of the source weights' logits, likewise.
    """

    def __init__(
        self, model: nn.Module, config: MethodConfig, chosen: Chosen = "norms", *, only_predicts: bool = False
    ) -> None:
        self.front = unwrap_model(model).front
        self.model = model.eval()  # also while its layers are found
        self.backbone = backbone_of(model)
        if self.backbone.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        keeps = only_predicts and config.bn == "running"
        module, norms = self.backbone.module, {} if keeps else self.backbone.batch_norms
        self._logits = self.backbone.forward if only_predicts else self.backbone.logits
        named = _chosen_weights(self.backbone, config, chosen)
        moving = running_statistics(norms) if config.bn == "recent" else {}
        model.requires_grad_(False)
        everything = {**dict(module.named_parameters()), **running_statistics(batch_norms(module))}
        self.weights = AdaptedWeights(named, everything, moving)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.micro_batch = config.micro_batch
        self.biases = _head_biases(self.backbone)
        self.centred, self.centre, self.source_centre = config.centre, Centre(self.device), Centre(self.device)
        self._config = config
        self._source_context = ForwardContext(module, config.precision)
        self.normalise(norms)

    def normalise(self, norms: Mapping[str, BatchNorm]) -> None:
        """Let these batch norms, by name, normalise as configured."""
        mixes, config = uses_batches(self.backbone.module), self._config
        self.batch_norms = BatchStatistics(norms, config.bn, config.bn_prior, mixes=mixes)

    @contextlib.contextmanager
    def context(self, device: torch.device) -> Iterator[None]:
        """Run forward passes on a device in the precision, and with the batch norms' statistics, as configured."""
        with self._source_context(device), self.batch_norms if self.batch_norms.mixes else contextlib.nullcontext():
            yield

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.backbone.device

    @property
    def num_classes(self) -> int:
        """Number of classes C."""
        return self.backbone.num_classes

    @cached_property
    def pixels(self) -> PixelSpace:
        """The conversion between preprocessed images and pixels in [0, 1]."""
        preprocessing = preprocessing_of(self.model)
        if self.front is None:
            return PixelSpace(preprocessing.mean, preprocessing.std)
        return PixelSpace(*self.front.normalisation(preprocessing.input_size))

    def check(self, images: Tensor) -> None:
        """Raise ValueError if this is not a batch of valid images (B, 3, H, W)."""
        check_images(images, self.backbone.input_size if self.front is None else None)

    def check_gradients(self, logits: Tensor) -> Tensor:
        """Return logits from which something is to be learned; raise ModelError if they have no gradients."""
        if not logits.requires_grad:
            kind = type(self.backbone.module).__name__
            raise ModelError(
                f"the logits of {kind} have no gradients, so nothing can be learned: its forward runs under "
                "torch.no_grad or inference_mode, or detaches; change that, or use the method fast, which needs none"
            )
        return logits

    def backward(self, result: Tensor, slope: Tensor | None = None) -> None:
        """Compute gradients of a loss, or of a result with its slope; raise ModelError if checkpointing prevents it."""
        try:
            result.backward(slope)
        except CheckpointError as error:
            kind = type(self.backbone.module).__name__
            raise ModelError(f"{kind} cannot be adapted with gradient checkpointing; turn it off") from error

    def enter(self, images: Tensor) -> Tensor:
        """Return the input of the classifier inside its wrappers, for images (B, 3, H, W); raise as `check` does."""
        self.check(images)
        if self.backbone.module.training:  # the caller may have called train() since
            self.model.eval()
        return images if self.front is None else self.front(images)

    def head(self, logits: Tensor) -> Tensor:
        """Return float32 logits (..., C) from the classifier's output, centred if configured.

        All logits that losses and answers use pass through here, also those of masked views.
        """
        return logits.float() - self.centre.offset

    def expect(self, images: Tensor, fit: Tensor, *, for_both: bool = False) -> None:
        """Start a new batch, whose plain logits come next; the mask (B,) selects images that count for centring.

        With `for_both`, they update the source model's centre, too, in place of logits of its own.
        """
        self.batch_norms.expect(len(fit) if fit.all() else 0)
        if self.centred:  # single views have no statistics of a batch
            shuffled = None if self.batch_norms.mixes else partial(self._shuffled, self._uncentred, images)
            for centre in (self.centre, self.source_centre) if for_both else (self.centre,):
                centre.expect(fit, shuffled)

    @torch.no_grad()
    def _shuffled(self, predict: Callable[[Tensor], Tensor], images: Tensor, places: Tensor) -> Tensor:
        """Return what `predict` returns for the images (B, 3, H, W) at some indices, with their patches shuffled."""
        grid = max(2, min(side // of for side, of in zip(images.shape[2:], self.backbone.patch_size, strict=True)))
        views = shuffle_patches(images[places.to(images.device)], grid, torch.Generator().manual_seed(0))
        return torch.cat([predict(part) for part in views.split(self.part_size(len(views)))])

    def _uncentred(self, images: Tensor) -> Tensor:
        with self._source_context(images.device):
            return self._logits(images).float()

    def note(self, plain: Tensor) -> Tensor:
        """Update the centre by the plain view's uncentred logits (B, C), if they are new; return them unchanged.

        Call it before other logits of the same batch pass through `head`.
        """
        if self.source_centre.waits:
            self.source_centre.note(plain)
            self.centre.follow(self.source_centre)
        self.centre.note(plain)
        return plain

    def plain(self, logits: Tensor) -> Tensor:
        """Return the plain view's logits (B, C) for losses and answers, from those that the classifier returned."""
        return self.head(self.note(logits))

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of preprocessed images (B, 3, H, W)."""
        with self.context(images.device):
            logits = self._logits(images)
        return self.plain(logits)

    def source_logits(self, images: Tensor) -> Tensor:
        """Return logits (B, C) of the source weights; batch norms have the source's statistics."""
        with self.weights.at_source():
            return self._uncentred(images)

    def centred_source(self, images: Tensor, logits: Tensor, fit: Tensor | None) -> Tensor:
        """Return the source weights' logits (B, C), centred; those of images in `fit` (B,) update both centres."""
        if self.centred and fit is not None:
            self.source_centre.expect(fit, partial(self._shuffled, self.source_logits, images))
            self.source_centre.note(logits)
            self.centre.follow(self.source_centre)
        return logits - self.source_centre.offset

    def forget_stream(self, *, keeps_source: bool = False) -> None:
        """Forget the images so far: their statistics in batch norms, and the centres; those of the adapted model's
        logits become the source weights' if `keeps_source`.
        """
        self.batch_norms.forget()
        if not keeps_source:
            self.source_centre.forget()
        self.centre.load_state(self.source_centre.state())

    def stream_state(self) -> dict[str, Tensor]:
        """Return the statistics in batch norms of the images so far, and what logits are centred by, on the CPU."""
        centres = {
            f"{place}.{name}": each for place, own in self._centres.items() for name, each in own.state().items()
        }
        return {**self.batch_norms.state(), **centres}

    def load_stream_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `stream_state` returned, among other entries."""
        self.batch_norms.load_state(state)
        for place, centre in self._centres.items():
            centre.load_state(within(f"{place}.", state))

    def with_offset(self, delta: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return a delta of weights with the centre's offset subtracted from the head's bias."""
        offset = self.centre.offset
        if not offset.ndim:
            return delta
        return {**delta, **{name: delta.get(name, torch.zeros_like(offset)) - offset for name in self.biases}}

    @property
    def _centres(self) -> dict[str, Centre]:
        return {"centre": self.centre, "source_centre": self.source_centre} if self.centred else {}

    def part_size(self, batch_size: int) -> int:
        """Return the number of images of a batch that are processed at a time."""
        return min(self.micro_batch or batch_size, batch_size)


def _chosen_weights(backbone: Backbone, config: MethodConfig, chosen: Chosen) -> dict[str, nn.Parameter]:
    if chosen == "none":
        return {}
    if chosen == "norms":
        return adapted_norms(backbone, config.adapt_layers)
    named = dict(backbone.module.named_parameters())
    if chosen == "all":
        return named
    # Not position embeddings, the class token and layer scales.
    return {name: each for name, each in named.items() if name.rpartition(".")[2] in ("weight", "bias")}


def _head_biases(backbone: Backbone) -> list[str]:
    """Return the names of a classifier's biases (C,), or of the last layer in it: one, two if distilled, or none."""
    found = []
    for place, classifier in backbone.classifiers.items():
        shapes = {name: each.shape for name, each in classifier.named_parameters(prefix=place)}
        found += [name for name in shapes if name.endswith(".bias") and shapes[name] == (backbone.num_classes,)][-1:]
    return found
