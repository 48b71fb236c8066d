"""The architectures of timm that can be adapted, and their backbones."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

import timm
from timm.models.beit import Beit
from timm.models.byobnet import ByobNet
from timm.models.convnext import ConvNeXt
from timm.models.efficientnet import EfficientNet
from timm.models.eva import Eva
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.regnet import RegNet
from timm.models.resnet import ResNet
from timm.models.resnetv2 import ResNetV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.backbones.backbone import Backbone, Builder
from remtta.backbones.tokens import Transformer, defined
from remtta.backbones.vit import BEiT, RotaryViT, ViT
from remtta.errors import ModelError, UsageError
from remtta.extensions import Extension, usable
from remtta.models.metadata import Size
from remtta.models.unwrapping import UnwrappedModel

_log = logging.getLogger(__name__)

STAGES: Mapping[type[nn.Module], tuple[str, str]] = {
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


class StagedClassifier(AnyClassifier):
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
        stages, stem = (
            names.split() for names in next(STAGES[family] for family in STAGES if isinstance(module, family))
        )
        if len(stages) == 1:
            stages = [f"{stages[0]}.{name}" for name, _ in module.get_submodule(stages[0]).named_children()]
        super().__init__(UnwrappedModel(module, module), stages, stem)

    @property
    def input_size(self) -> Size | None:
        embed = getattr(self.module, "patch_embed", None)
        return tuple(embed.img_size) if embed is not None and getattr(embed, "strict_img_size", False) else None


FAMILIES: dict[type[nn.Module], Builder] = {
    VisionTransformer: ViT,
    Eva: RotaryViT,
    Beit: BEiT,
    **dict.fromkeys(STAGES, StagedClassifier),
}
"""By the class of the model; the first matching class counts."""


def family_of(module: nn.Module) -> Builder | None:
    """Return what builds the backbone of a timm model, if its family is known."""
    matching = (
        backbone
        for architecture, backbone in FAMILIES.items()
        if isinstance(module, architecture) and not _overrides_forward(module, backbone)
    )
    return next(matching, None)


def _overrides_forward(module: VisionTransformer, backbone: Builder) -> bool:
    """Return True if a transformer, or its class, has a forward pass other than timm's, or hooks change it."""
    if not (isinstance(backbone, type) and issubclass(backbone, Transformer)):
        return False
    base = backbone.architecture
    overridden = any(defined(module, name) is not getattr(base, name) for name in ("forward", "forward_features"))
    return overridden or bool(module._forward_pre_hooks or module._forward_hooks)


def with_tokens(backbone: Backbone, method: str) -> Transformer:
    """Return the same backbone; raise ModelError if there are no tokens between its blocks."""
    if not isinstance(backbone, Transformer):
        raise ModelError(
            f"{method} works on tokens between a transformer's blocks, and {type(backbone.module).__name__} has none; "
            "choose another method, or a ViT such as vit_base_patch16_224"
        )
    return backbone


def modules_without_family() -> list[str]:
    """Return timm's modules that neither define nor import a class of FAMILIES."""
    modules = {module: vars(import_module(f"timm.models.{module}")).values() for module in timm.list_modules()}
    return sorted(
        module
        for module, content in modules.items()
        if not any(isinstance(member, type) and issubclass(member, tuple(FAMILIES)) for member in content)
    )


def find_families() -> dict[type[nn.Module], Builder]:
    """Return the families of other packages, whose modules may also register timm models; warn of those that cannot be
    imported, are no mapping, or have a class that is taken.
    """
    found: dict[type[nn.Module], Builder] = {}
    _, reasons = usable("backbones", lambda extension: _add_families(extension, found))
    for reason in reasons:
        _log.warning("%s", reason)
    return found


def _add_families(extension: Extension, found: dict[type[nn.Module], Builder]) -> None:
    if extension.entry is None:
        return  # of one of remtta's parts: see lookup.py
    families, source = extension.load(), f"{extension.target} of {extension.owner}"
    if not isinstance(families, Mapping) or not all(isinstance(kind, type) for kind in families):
        raise UsageError(
            f"{source} is not a mapping from model classes to functions that return a backbone; uninstall it"
        )
    for architecture in families.keys() & {*FAMILIES, *found}:
        raise UsageError(f"{source} has a second backbone for {architecture.__name__}; uninstall it")
    found |= families


FAMILIES = {**find_families(), **FAMILIES}  # last, as their modules import this one
