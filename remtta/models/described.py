"""A classifier with what it does not tell of itself, and the logits in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from remtta.errors import ModelError

if TYPE_CHECKING:
    from remtta.models.preprocessing import Preprocessing

Output = Callable[[Any], Tensor]
"""From what a model returns to logits (B, C)."""


class Described(nn.Module):
    """A classifier, with what it does not tell of itself.

    Args:
        module: The classifier.
        output: From what it returns to logits (B, C); None where that is logits, or has them as `logits`.
        patch_size: Height and width of the patches that masks leave out, in pixels; None for the model's own.
        preprocessing: How images become its inputs; None for what it says itself, or else ImageNet's.
        labels: Class names; None for what it says itself.
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
        self.module, self.output, self.patch_size = module, output, patch_size
        self.preprocessing, self.labels = preprocessing, labels

    def forward(self, images: Tensor) -> Tensor:
        return logits_in(self.module(images), self.output, self.module)


def logits_in(returned: Any, output: Output | None, model: nn.Module) -> Tensor:
    """Return the logits (B, C) in what a model returned.

    Raises:
        ModelError: If there are none, with what to do.
    """
    found = returned if output is None else output(returned)
    found = getattr(found, "logits", found)  # transformers' outputs
    if isinstance(found, Tensor) and found.ndim == 2:
        return found
    raise ModelError(f"{type(model).__name__} returns {_shown(found)}, not logits (B, C); {_remedy(found)}")


def output_of(model: nn.Module) -> Output | None:
    """Return what makes a model's logits of what it returns, where that was said."""
    return model.output if isinstance(model, Described) else None


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}" + (f" of {', '.join(map(str, value))}" if isinstance(value, Mapping) else "")


def _remedy(value: Any) -> str:
    if isinstance(value, Mapping) and value:
        key = "logits" if "logits" in value else next(iter(value))
        return f'say where they are: remtta.Adapter(model, output=lambda o: o["{key}"])'
    if isinstance(value, tuple | list):
        return "say where they are: remtta.Adapter(model, output=lambda o: o[0])"
    return "say how they become that: remtta.Adapter(model, output=lambda o: ...)"
