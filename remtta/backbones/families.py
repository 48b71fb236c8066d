"""The architectures that can be adapted, and their backbones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import timm
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from remtta.backbones.any_classifier import STAGES, AnyClassifier, StagedClassifier
from remtta.backbones.backbone import Backbone
from remtta.backbones.onnx_backbone import OnnxBackbone
from remtta.backbones.tokens import Transformer, defined
from remtta.backbones.vit import BEiT, RotaryViT, ViT
from remtta.errors import ModelError, UsageError
from remtta.models.onnx_model import OnnxClassifier
from remtta.models.unwrapping import unwrap_model
from remtta.plugins import BACKBONES, load_plugin, package_of, plugins

Builder = Callable[[Any], Backbone]
"""Returns a model's backbone, or raises ModelError."""

FAMILIES: dict[type[nn.Module], Builder] = {
    VisionTransformer: ViT,
    Eva: RotaryViT,
    Beit: BEiT,
    **dict.fromkeys(STAGES, StagedClassifier),
}
"""By the class of the model; the first matching class counts."""


def backbone_of(model: nn.Module) -> Backbone:
    """Return the backbone of a model or of what its wrappers hold: that of its family, or the one for any classifier;
    raise ModelError, with the reason, if it cannot be adapted.
    """
    unwrapped = unwrap_model(model)
    if isinstance(unwrapped.module, OnnxClassifier):
        return OnnxBackbone(unwrapped.module)
    if unwrapped.is_timm:
        for architecture, backbone in FAMILIES.items():
            if isinstance(unwrapped.module, architecture) and not _overrides_forward(unwrapped.module, backbone):
                return backbone(unwrapped.module)
    return AnyClassifier(unwrapped)


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


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks with torch.compile, in place; parameter names do not change. Raise ModelError for other
    classifiers, whose hooks do not go together with compiled blocks.
    """
    backbone = backbone_of(model)
    if type(backbone) is AnyClassifier:
        name = type(backbone.module).__name__
        raise ModelError(f"{name} is in no family whose blocks remtta can compile; leave --compile out")
    for block in backbone.blocks:
        block.compile(dynamic=True)  # the views differ in their number of tokens


def modules_without_family() -> list[str]:
    """Return timm's modules that neither define nor import a class of FAMILIES."""
    modules = {module: vars(import_module(f"timm.models.{module}")).values() for module in timm.list_modules()}
    return sorted(
        module
        for module, content in modules.items()
        if not any(isinstance(member, type) and issubclass(member, tuple(FAMILIES)) for member in content)
    )


def find_families() -> dict[type[nn.Module], Builder]:
    """Return the families of other packages, whose modules may also register timm models; raise UsageError if one
    cannot be imported, is not a mapping, or has a class that is taken.
    """
    found: dict[type[nn.Module], Builder] = {}
    for entry in plugins(BACKBONES):
        families, source = load_plugin(entry), f"{entry.value} of the package {package_of(entry)}"
        if not isinstance(families, Mapping):
            raise UsageError(f"{source} is not a mapping from model classes to functions that return a backbone")
        for architecture in families.keys() & {*FAMILIES, *found}:
            raise UsageError(f"{source} has a second backbone for {architecture.__name__}; uninstall the package")
        found |= families
    return found


FAMILIES = {**find_families(), **FAMILIES}  # last, as their modules import this one
