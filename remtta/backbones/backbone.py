"""What a method may ask of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from remtta.models.heads import classifiers_of

BatchNorm = nn.modules.batchnorm._BatchNorm

Scores = Literal["attention", "features", "gradcam"]
"""What ranks patches: what the class token or the pool attends to, how strong their features are, or Grad-CAM."""


@runtime_checkable
class Backbone(Protocol):
    """A classifier of images whose views may leave out patches.

    All views of a batch start from what `embed` returns: tokens, or the images
    themselves where masks lie on pixels. Only the backbone looks into it;
    others may index its images (B first) and hand it back.

    Attributes:
        module: The model itself, without wrappers; parameters and deltas have its names.
        kinds: What there is of it, each in a few words, and a timm model that is one.
    """

    module: nn.Module
    kinds: ClassVar[Mapping[str, str]] = {}

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """What `adapt_layers` numbers and `compile_blocks` compiles, in the order of the forward pass."""

    def parts(self, number: int) -> Sequence[nn.Module]:
        """Return whose norms adapt with block `number`: its own; with the first, possibly the stem's."""
        return [self.blocks[number]]

    @property
    def channel_axis(self) -> int:
        """Axis of the channels D in what blocks hand on, which is maps or tokens, with the images B first."""
        return 1

    @property
    def batch_norms(self) -> Mapping[str, BatchNorm]:
        """Layers, by name, that may normalise by a batch's statistics while a method adapts."""
        return {}

    @property
    def num_patches(self) -> int:
        """Patches N of an image of the model's own size: what a mask leaves out some of."""

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""

    @property
    def num_tokens(self) -> int:
        """Rows per image in a block's matrix products, at the model's own size."""

    @property
    def num_passing(self) -> int:
        """About how many numbers a forward pass of one image holds beside its graph, at its widest."""

    @property
    def input_size(self) -> tuple[int, int] | None:
        """Height and width that images must have; None for any."""

    @property
    def num_classes(self) -> int:
        """Classes of the head, 0 without one."""
        return getattr(self.module, "num_classes", 0) or 0

    @property
    def device(self) -> torch.device:
        """The device of its weights."""
        return next(self.module.parameters()).device

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        """What makes the logits, by its place; empty where that is not known."""
        return classifiers_of(self.module) if hasattr(self.module, "get_classifier") else {}

    def embed(self, images: Tensor) -> Tensor:
        """What all views of preprocessed images (B, 3, H, W) start from, B first."""

    def count_patches(self, embedded: Tensor) -> int:
        """Patches N of each of these images, whose size may be another than the model's own."""

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        """Logits (B, C), of all patches or with only those at the positions (B, K) kept."""

    def logits(self, images: Tensor) -> Tensor:
        """Logits (B, C) of preprocessed images (B, 3, H, W)."""
        return self.classify(self.embed(images))

    def forward(self, images: Tensor) -> Tensor:
        """The same, by a forward pass of the module in which every block is called."""
        logits: Tensor = self.module(images)
        return logits

    def check_scores(self, kind: Scores) -> None:
        """Raise ModelError if this model has no such scores."""

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of all patches, and scores (B, N) of each, which carry no gradient."""

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of preprocessed images (B, 3, H, W), and the features (B, D) that the head makes them from."""


def check_images(images: Tensor, input_size: tuple[int, int] | None) -> None:
    """Raise ValueError unless this is a batch of preprocessed images of this size."""
    height, width = input_size or ("H", "W")
    wanted = f"float32 of shape (B, 3, {height}, {width}) with B >= 1"
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a tensor, {wanted}, got {type(images).__name__}")
    fits = images.ndim == 4 and len(images) > 0 and images.shape[1] == 3
    fits = fits and input_size in (None, tuple(images.shape[2:]))
    if not fits or images.dtype != torch.float32:
        raise ValueError(f"images must be {wanted}, got {images.dtype} of shape {tuple(images.shape)}")
