"""Metadata of a model in memory: what the user states, and what a forward pass of one image shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary

from torch import Tensor, nn

from remtta.errors import ModelError, UsageError

if TYPE_CHECKING:
    from remtta.models.preprocessing import Preprocessing

Size = tuple[int, int]
"""Height and width, or rows and columns."""

Shape = tuple[int, ...]

Bf16Weights = dict[int, tuple[Tensor, int, Tensor]]
"""Frozen parameters by id, with the version that was converted, and its copy in bf16."""

PretrainedConfig = dict[str, Any]
"""Preprocessing, labels and origin of a model, in the form of timm's `pretrained_cfg`."""

Output = Callable[[Any], Tensor]
"""A function from a model's output to logits (B, C)."""


@dataclass(frozen=True)
class Trace:
    """The record of one image's forward pass through a model."""

    path: str  # the classifier's module path in its wrappers; "" for the model itself
    changes_images: bool  # whether the wrappers change images before it
    input_size: Size  # of the image, in pixels
    inner_size: Size  # of the image that reaches the classifier, which a wrapper may resize
    in_place: bool  # whether the model changes its input
    num_classes: int
    head: str | None  # module path of the layer that returns the logits, if there is one
    shapes: Mapping[str, tuple[Shape, Shape]]
    """Shapes of each layer's input and output by its module path, in the order of their calls; () for values that are
    not tensors."""


@dataclass
class ModelMetadata:
    """Facts inferred about a model, and what is kept with it; freed with the model."""

    trace: Trace | None = None
    traced_modules: Sequence[int] = ()  # ids of the modules that the model had then
    bf16_weights: Bf16Weights = field(default_factory=dict)  # shared by all methods on it
    adapter: ReferenceType[object] | None = None  # the last Adapter made of it
    requires_grad: Mapping[Tensor, bool] = field(default_factory=dict)  # of its weights before the first Adapter


_METADATA: WeakKeyDictionary[nn.Module, ModelMetadata] = WeakKeyDictionary()


def metadata_of(model: nn.Module) -> ModelMetadata:
    """Return the metadata of a model, which callers may complete."""
    return _METADATA.setdefault(model, ModelMetadata())


class TimmModel(nn.Module):
    """Attributes common to timm's models; only for annotations."""

    num_classes: int
    num_features: int
    pretrained_cfg: PretrainedConfig
    default_cfg: PretrainedConfig


class ModelWithMetadata(nn.Module):
    """A classifier, with metadata that it lacks itself.

    Args:
        module: The classifier.
        output: Function from its output to logits (B, C); None if the output is the logits, or has them as `logits`.
        patch_size: Height and width of the patches that masks leave out, in pixels; None for the model's own.
        preprocessing: Its preprocessing; None for the one in its own config, or else ImageNet's.
        labels: Class names; None for those in its own config.
    """

    def __init__(
        self,
        module: nn.Module,
        output: Output | None = None,
        patch_size: Size | None = None,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        sides = patch_size if isinstance(patch_size, tuple | list) else ()
        if patch_size is not None and not (len(sides) == 2 and min(sides) > 0):
            raise UsageError(f"patch_size needs (height, width) in pixels, got {patch_size}")
        self.module, self.output, self.patch_size = module, output, patch_size
        self.preprocessing, self.labels = preprocessing, labels

    def forward(self, images: Tensor) -> Tensor:
        return logits_in(self.module(images), self.output, self.module)


def logits_in(returned: object, output: Output | None, model: nn.Module) -> Tensor:
    """Return the logits (B, C) in a model's output; raise ModelError if there are none, with what to do."""
    found = returned if output is None else output(returned)
    found = getattr(found, "logits", found)  # transformers' outputs
    if isinstance(found, Tensor) and found.ndim == 2:
        return found
    if isinstance(found, Tensor):
        description = f"a tensor of shape {tuple(found.shape)}"
    else:
        names = f" of {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
        description = f"a {type(found).__name__}{names}"
    if isinstance(found, Mapping) and found:
        key = "logits" if "logits" in found else "..."
        remedy = f'select them: remtta.Adapter(model, output=lambda o: o["{key}"])'
    elif isinstance(found, tuple | list):
        remedy = "select them: remtta.Adapter(model, output=lambda o: o[0])"
    else:
        remedy = "convert the output: remtta.Adapter(model, output=lambda o: ...)"
    raise ModelError(f"{type(model).__name__} returns {description}, not logits (B, C); {remedy}")


def output_of(model: nn.Module) -> Output | None:
    """Return the function from a model's output to its logits, if the user gave one."""
    return model.output if isinstance(model, ModelWithMetadata) else None
