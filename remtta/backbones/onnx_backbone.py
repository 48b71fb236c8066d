"""The backbone of a classifier in an ONNX file: forward passes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

from torch import Tensor, nn

from remtta.backbones.any_classifier import AnyClassifier
from remtta.errors import ModelError
from remtta.models.metadata import Size
from remtta.models.onnx_model import OnnxClassifier
from remtta.models.unwrapping import UnwrappedModel, classifiers_of


class OnnxBackbone(AnyClassifier):
    """A classifier in an ONNX file."""

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
