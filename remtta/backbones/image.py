"""timm's hierarchical and convolutional classifiers, which are masked in the image, since they have no patch tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from timm.models.byobnet import ByobNet
from timm.models.convnext import ConvNeXt
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.regnet import RegNet
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.models.unwrapping import UnwrappedModel

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


class ImageBackbone(AnyClassifier):
    """A classifier with stages, whose views are images; patches are the cells of its last feature map, on the image."""

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
        stages, stem = (names.split() for names in next(LAYOUTS[kind] for kind in LAYOUTS if isinstance(module, kind)))
        if len(stages) == 1:
            stages = [f"{stages[0]}.{name}" for name, _ in module.get_submodule(stages[0]).named_children()]
        super().__init__(UnwrappedModel(module, module), (stages, stem))

    @property
    def input_size(self) -> tuple[int, int] | None:
        embed: Any = getattr(self.module, "patch_embed", None)
        return tuple(embed.img_size) if getattr(embed, "strict_img_size", False) else None
