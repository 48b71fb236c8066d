"""Find the backbone of a model, and compile it. timm is imported for its own models only, as that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import cast

from torch import nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.backbones.backbone import Backbone, Builder
from remtta.errors import ModelError
from remtta.extensions import built_in, of_packages
from remtta.models.unwrapping import unwrap_model


def backbone_of(model: nn.Module) -> Backbone:
    """Return the backbone of a model or of what its wrappers hold: that of its family, or the one for any classifier;
    raise ModelError, with the reason, if it cannot be adapted.
    """
    unwrapped = unwrap_model(model)
    builder = _of_part(unwrapped.module)
    if builder is None and (unwrapped.is_timm or of_packages("backbones", ())[0]):
        from remtta.backbones.families import family_of

        builder = family_of(unwrapped.module)
    return AnyClassifier(unwrapped) if builder is None else builder(unwrapped.module)


def _of_part(module: nn.Module) -> Builder | None:
    """Return what builds the backbone of a model whose class is one of remtta's parts."""
    for extension in built_in("backbones").values():
        if extension.module in sys.modules:  # which has the class, too: without it, there is no such model
            families = cast(Mapping[type[nn.Module], Builder], extension.load())
            if type(module) in families:
                return families[type(module)]
    return None


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
