"""The interface that methods use on a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from remtta.models.unwrapping import classes_of_timm, classifiers_of

BatchNorm = nn.modules.batchnorm._BatchNorm

Scores = Literal["attention", "features", "gradcam"]
"""Scores of patches: attention of the class token or the pool, norm of their features, or Grad-CAM."""


class Backbone(Protocol):
    """An image classifier whose views may leave out patches.

    All views of a batch start from the output of `embed`: tokens, or the images themselves if masks apply to pixels.
    Only the backbone interprets this output; callers may index its first axis B and pass it back.

    Attributes:
        module: The model itself, without wrappers, whose names parameters and deltas use.
        kinds: Descriptions of its variants, with a timm model of each.
    """

    module: nn.Module
    kinds: ClassVar[Mapping[str, str]] = {}

    @property
    def forward_only(self) -> str:
        """Why there are no gradients, only forward passes, such as "x.onnx is an ONNX file"; "" if there are."""
        return ""

    @property
    def advice_on_norms(self) -> str:
        """Advice on batch norms that are out of reach, and so do not follow the stream; "" if there are none."""
        return ""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The modules that `adapt_layers` numbers and `compile_blocks` compiles, in the order of the forward pass."""

    def parts(self, number: int) -> Sequence[nn.Module]:
        """Return the modules whose norms adapt with block `number`; the first may come with the stem."""
        return [self.blocks[number]]

    @property
    def channel_axis(self) -> int:
        """Axis of the channels D in the outputs of blocks, which are maps or tokens with the images B first."""
        return 1

    @property
    def batch_norms(self) -> Mapping[str, BatchNorm]:
        """Layers, by name, that may use a batch's statistics while a method adapts."""
        return {}

    @property
    def num_patches(self) -> int:
        """Number of patches N of an image of the model's own size."""

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""

    @property
    def num_tokens(self) -> int:
        """Rows per image in a block's matrix products, at the model's own size."""

    @property
    def num_passing(self) -> int:
        """Approximate peak number of activation elements per image outside autograd."""

    @property
    def input_size(self) -> tuple[int, int] | None:
        """Required height and width of images; None for any."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the head, 0 without one."""
        return classes_of_timm(self.module)

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        """The layers that return the logits, by module path; empty if unknown."""
        return classifiers_of(self.module)

    def embed(self, images: Tensor) -> Tensor:
        """Return the common start of all views of preprocessed images (B, 3, H, W), B first."""

    def count_patches(self, embedded: Tensor) -> int:
        """Return the number of patches N of each of these images, whose size may differ from the model's own."""

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return the logits (B, C) with all patches, or only with those at the indices `kept` (B, K)."""

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits (B, C) of preprocessed images (B, 3, H, W)."""
        return self.classify(self.embed(images))

    def forward(self, images: Tensor) -> Tensor:
        """Return the same logits by a forward pass of the module that calls every block."""
        return self.module(images)

    def check_scores(self, scores: Scores) -> None:
        """Raise ModelError if this model has no such scores."""

    def classify_with_scores(self, embedded: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C) with all patches, and scores (B, N) of the patches, without gradient."""

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C) of preprocessed images (B, 3, H, W), and the features (B, D) that enter the head."""


Builder = Callable[[Any], Backbone]
"""Returns a model's backbone, or raises ModelError."""


def check_dense(images: Tensor) -> None:
    """Raise ValueError unless a tensor holds its values one after the other."""
    if images.layout != torch.strided or images.is_nested:
        held = "nested" if images.is_nested else str(images.layout).removeprefix("torch.")
        raise ValueError(f"images must be a dense tensor, got a {held.strip('_')} tensor")


def check_images(images: Tensor, input_size: tuple[int, int] | None, dtype: torch.dtype = torch.float32) -> None:
    """Raise ValueError unless this is a batch of images of this size and type; by default preprocessed ones."""
    height, width = input_size or ("H", "W")
    expected = f"{str(dtype).removeprefix('torch.')} of shape (B, 3, {height}, {width}) with B >= 1"
    if not isinstance(images, Tensor):
        raise ValueError(f"images must be a tensor, {expected}, got {type(images).__name__}")
    check_dense(images)
    is_batch = images.ndim == 4 and len(images) > 0 and images.shape[1] == 3
    if not is_batch or input_size not in (None, tuple(images.shape[2:])) or images.dtype != dtype:
        channels_last = images.ndim == 4 and images.shape[1] != 3 and images.shape[3] == 3
        hint = "; images.permute(0, 3, 1, 2) puts the channels first" if channels_last else ""
        raise ValueError(f"images must be {expected}, got {images.dtype} of shape {tuple(images.shape)}{hint}")
