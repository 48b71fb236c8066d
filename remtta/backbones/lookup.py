"""Find the backbone of a model, and compile it. timm is imported for its own models only, as that takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from torch import Tensor, nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.backbones.backbone import Backbone
from remtta.errors import ModelError
from remtta.formats.onnx_model import OnnxClassifier
from remtta.models.metadata import Size
from remtta.models.unwrapping import UnwrappedModel, classifiers_of, unwrap_model


class OnnxBackbone(AnyClassifier):
    """A classifier in an ONNX file: forward passes only."""

    def __init__(self, module: OnnxClassifier) -> None:
        super().__init__(UnwrappedModel(module, module))
        self._file = module

    @property
    def _structure(self) -> Never:
        raise ModelError(f"the layers of an ONNX file such as {self._file.path.name} cannot be reached")

    @property
    def patch_size(self) -> Size:
        return self._file.patch_size

    @property
    def input_size(self) -> Size | None:
        return self._file.input_size

    @property
    def classifiers(self) -> Mapping[str, nn.Module]:
        return classifiers_of(self.module)

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images)

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self._file.classify_with_features(images)


def backbone_of(model: nn.Module) -> Backbone:
    """Return the backbone of a model or of what its wrappers hold: that of its family, or the one for any classifier;
    raise ModelError, with the reason, if it cannot be adapted.
    """
    unwrapped = unwrap_model(model)
    if isinstance(unwrapped.module, OnnxClassifier):
        return OnnxBackbone(unwrapped.module)
    if unwrapped.is_timm:
        from remtta.backbones.families import family_of

        if (backbone := family_of(unwrapped.module)) is not None:
            return backbone(unwrapped.module)
    return AnyClassifier(unwrapped)


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
