"""A classifier with metadata that it lacks itself, and the logits in its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from remtta.errors import ModelError, UsageError

if TYPE_CHECKING:
    from remtta.models.preprocessing import Preprocessing

Output = Callable[[Any], Tensor]
"""A function from a model's output to logits (B, C)."""


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
        patch_size: tuple[int, int] | None = None,
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


def logits_in(returned: Any, output: Output | None, model: nn.Module) -> Tensor:
    """Return the logits (B, C) in a model's output; raise ModelError if there are none, with what to do."""
    found = returned if output is None else output(returned)
    found = getattr(found, "logits", found)  # transformers' outputs
    if isinstance(found, Tensor) and found.ndim == 2:
        return found
    raise ModelError(f"{type(model).__name__} returns {_shown(found)}, not logits (B, C); {_remedy(found)}")


def output_of(model: nn.Module) -> Output | None:
    """Return the function from a model's output to its logits, if one was given."""
    return model.output if isinstance(model, ModelWithMetadata) else None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {', '.join(map(str, value))}" if isinstance(value, Mapping) else "")


def _remedy(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        key = "logits" if "logits" in value else "..."
        return f'select them: remtta.Adapter(model, output=lambda o: o["{key}"])'
    if isinstance(value, tuple | list):
        return "select them: remtta.Adapter(model, output=lambda o: o[0])"
    return "convert the output: remtta.Adapter(model, output=lambda o: ...)"
