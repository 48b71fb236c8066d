"""timm's hierarchical and convolutional classifiers, which are masked in the image, since they have no patch tokens."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from timm.models.byobnet import ByobNet
from timm.models.convnext import ConvNeXt
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.regnet import RegNet
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.backbone import Backbone, BatchNorm, Scores
from remtta.backbones.batchnorm import batch_norms
from remtta.errors import ModelError
from remtta.models.preprocessing import preprocessing_of

_HELD = 4  # tensors of the largest size that a block holds at once: input, its norm, output, an activation


LAYOUTS: Mapping[type[nn.Module], tuple[str, str]] = {
    ResNet: ("layer1 layer2 layer3 layer4", "conv1 bn1"),
    ResNetV2: ("stages", "stem"),
    ConvNeXt: ("stages", "stem"),
    SwinTransformer: ("layers", "patch_embed"),
    SwinTransformerV2: ("layers", "patch_embed"),
    ByobNet: ("stages", "stem"),  # MobileViT among others
    EfficientNet: ("blocks", "conv_stem bn1"),  # and MobileNetV2
    MobileNetV3: ("blocks", "conv_stem bn1"),
    RegNet: ("s1 s2 s3 s4", "stem"),
}
"""Attributes with the stages of each family, or with the list of them all, and those of the stem.

Layers after the stages adapt only if all norms do.
"""


@dataclass(frozen=True)
class _Shape:
    """Sizes within the model for images of some size."""

    grid: tuple[int, int]  # rows and columns of the last feature map
    num_tokens: int  # positions of the map after the first stage
    max_values: int  # size of the largest tensor


_SHAPES: WeakKeyDictionary[nn.Module, dict[tuple[int, int], _Shape]] = WeakKeyDictionary()
"""Shapes of each model by height and width, cached because each takes a forward pass."""


class ImageBackbone(Backbone):
    """A classifier with stages, whose views are images; masked patches have the mean colour.

    Patches are the cells of the last feature map, projected onto the image. The paper says that CNNs mask pixels or
    patches of the input, but not with what value: here they are zero after normalisation, which is the mean colour of
    the preprocessing.
    """

    kinds: ClassVar[Mapping[str, str]] = {
        "ResNet (ResNeXt, Wide ResNet, SE-ResNet)": "resnet50",
        "ResNetV2 (BiT)": "resnetv2_50",
        "ConvNeXt": "convnext_tiny",
        "ConvNeXt V2": "convnextv2_tiny",
        "Swin": "swin_tiny_patch4_window7_224",
        "Swin V2": "swinv2_tiny_window8_256",
        "MobileViT": "mobilevit_s",
        "MobileViT V2": "mobilevitv2_100",
        "ByobNet (RegNetZ, RepVGG)": "regnetz_b16",
        "EfficientNet": "efficientnet_b0",
        "MobileNetV2": "mobilenetv2_100",
        "MobileNetV3, MobileNetV4": "mobilenetv3_small_100",
        "RegNet": "regnety_016",
    }

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self._stages, self._stem = next(layout for kind, layout in LAYOUTS.items() if isinstance(module, kind))
        self._shapes = _SHAPES.setdefault(module, {})

    @property
    def blocks(self) -> Sequence[nn.Module]:
        stages = [getattr(self.module, name) for name in self._stages.split()]
        return list(stages[0]) if len(stages) == 1 else stages

    def parts(self, number: int) -> Sequence[nn.Module]:
        stem = [getattr(self.module, name) for name in self._stem.split()] if number == 0 else []
        return [*stem, self.blocks[number]]

    @property
    def channel_axis(self) -> int:
        return -1 if getattr(self.module, "output_fmt", "NCHW") == "NHWC" else 1  # Swin has it last

    @property
    def batch_norms(self) -> Mapping[str, BatchNorm]:
        return batch_norms(self.module)

    @property
    def num_patches(self) -> int:
        return math.prod(self._own_shape.grid)

    @property
    def patch_size(self) -> tuple[int, int]:
        (height, width), (rows, columns) = self._own_size, self._own_shape.grid
        return math.ceil(height / rows), math.ceil(width / columns)

    @property
    def num_tokens(self) -> int:
        """Positions of the map after the first stage, for an image of the model's own size."""
        return self._own_shape.num_tokens

    @property
    def num_passing(self) -> int:
        return _HELD * self._own_shape.max_values

    @property
    def input_size(self) -> tuple[int, int] | None:
        embed: Any = getattr(self.module, "patch_embed", None)
        return tuple(embed.img_size) if getattr(embed, "strict_img_size", False) else None

    def embed(self, images: Tensor) -> Tensor:
        return images

    def count_patches(self, embedded: Tensor) -> int:
        return math.prod(self._shape(embedded.shape[2:]).grid)

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        images = embedded if kept is None else paint_out(embedded, kept, self._shape(embedded.shape[2:]).grid)
        logits: Tensor = self.module(images)
        return logits

    def check_scores(self, kind: Scores) -> None:
        if kind == "attention":
            raise ModelError(
                f"{type(self.module).__name__} has no class token to mask by; "
                "choose --set masking=features or --set masking=gradcam"
            )

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and a score (B, N) of each position of the last feature map.

        "features" is the L2 norm of the features (feature activation), "gradcam" their contribution to the predicted
        class.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, "Experiments on Different Network Architectures".
        """
        features = self.module.forward_features(embedded)
        logits: Tensor = self.module.forward_head(features)
        if kind == "gradcam":
            return logits, self._class_activation(features)
        return logits, self._positions_first(features.detach()).float().norm(dim=-1)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.module.forward_features(images)
        return self.module.forward_head(features), self.module.forward_head(features, pre_logits=True)

    @torch.inference_mode(False)  # the caller may be inside one
    @torch.enable_grad()
    def _class_activation(self, features: Tensor) -> Tensor:
        """Return Grad-CAM (B, N) of the predicted class over the last feature map.

        Each channel is weighted by the gradient of the class's logit, averaged over all positions. Grad-CAM then clips
        negative values; that is left out, since it only creates ties in the order.

        Source: Grad-CAM, arXiv:1610.02391, Eq. 1 and 2.
        """
        features = features.detach().clone().requires_grad_()
        best = self.module.forward_head(features).float().amax(-1).sum()
        (gradient,) = torch.autograd.grad(best, features)
        weights = self._positions_first(gradient).float().mean(1, keepdim=True)  # (B, 1, D)
        return (weights * self._positions_first(features.detach()).float()).sum(-1)

    def _positions_first(self, features: Tensor) -> Tensor:
        """Return a feature map in the model's axis order as (B, N, D)."""
        return features.movedim(self.channel_axis, -1).flatten(1, 2)

    @property
    def _own_size(self) -> tuple[int, int]:
        return preprocessing_of(self.module).input_size

    @property
    def _own_shape(self) -> _Shape:
        return self._shape(self._own_size)

    def _shape(self, size: Sequence[int]) -> _Shape:
        height, width = size
        if (height, width) not in self._shapes:
            self._shapes[height, width] = self._measure(height, width)
        return self._shapes[height, width]

    def _measure(self, height: int, width: int) -> _Shape:
        """Run the model on meta tensors, which have a shape but no content, to find its shapes."""
        model, first = self.module, self.blocks[0]
        sizes: list[torch.Size] = []
        most = 0

        def note(layer: nn.Module, inputs: Any, output: Any) -> None:
            nonlocal most
            if isinstance(output, Tensor):
                most = max(most, output.numel())
                if layer is first:
                    sizes.append(output.shape)

        hooks = [layer.register_forward_hook(note) for layer in model.modules()]
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        empty = {f"model.{name}": torch.empty_like(tensor, device="meta") for name, tensor in named.items()}
        compiled = any(layer._compiled_call_impl is not None for layer in model.modules())
        image = torch.empty(1, 3, height, width, device="meta")
        try:
            with torch.no_grad(), torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
                features = torch.func.functional_call(_Features(model), empty, image)
        finally:
            for hook in hooks:
                hook.remove()
        return _Shape(self._grid(features.shape), math.prod(self._grid(sizes[0])), most)

    def _grid(self, shape: torch.Size) -> tuple[int, int]:
        """Return the rows and columns of a feature map of this shape."""
        return (shape[1], shape[2]) if self.channel_axis == -1 else (shape[2], shape[3])


def paint_out(images: Tensor, kept: Tensor, grid: tuple[int, int]) -> Tensor:
    """Set the patches of images (B, 3, H, W) to zero except those kept (B, K), indices on the grid in row-major order.

    If the grid does not divide H or W, patches differ in size by a pixel.
    """
    stays = images.new_zeros(len(kept), math.prod(grid)).scatter_(1, kept, 1.0)
    return images * F.interpolate(stays.view(-1, 1, *grid), size=images.shape[2:], mode="nearest")


class _Features(nn.Module):
    """A model up to its last feature map, as a module whose weights `functional_call` can replace."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model.forward_features(images)
        return features
