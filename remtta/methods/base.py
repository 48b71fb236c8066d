"""What every method holds."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from remtta.backbones.batchnorm import batch_norms, running_statistics
from remtta.models.precision import Context, ForwardContext
from remtta.models.weights import AdaptedWeights, Committed

DELTA = "delta."
"""What begins the names of a delta's tensors in a state."""


class MethodBase:
    """A frozen model in eval mode, the way of its weights from the source, and the last batch's views.

    Args:
        model: The classifier, in its wrappers.
        module: The same without them; deltas have its parameters' names.
        named: The parameters that adapt, by these names.
        precision: Of the forward passes.
        moving: Running statistics that change with them.

    Raises:
        ModelError: If a parameter that adapts is not float32.
    """

    adapts = False
    needs_labels = False
    needs_source = False
    most_source_images: int | None = None
    norms_only = True
    num_models = 1
    delta_refusal: str | None = None

    def __init__(
        self,
        model: nn.Module,
        module: nn.Module,
        named: Mapping[str, nn.Parameter],
        precision: str,
        moving: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.model = model.eval().requires_grad_(False)
        self._context: Context = ForwardContext(module, precision)
        others = {**dict(module.named_parameters()), **running_statistics(batch_norms(module))}
        self._weights = AdaptedWeights(named, others, moving)
        self._last_views: Tensor | None = None

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the adapted parameters, as in the timm model's `named_parameters()`."""
        return tuple(self._weights.parameters)

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""
        return self._weights.committed

    @property
    def num_updates(self) -> int:
        """Updates that the current weights have seen."""
        return self.committed[1]

    @property
    def last_views(self) -> Tensor | None:
        """Logits (L, B, C) behind the last batch's prediction: the plain view, then the method's others."""
        return self._last_views

    def enter(self) -> None:
        """Put the adapted weights in the model, after `leave`."""
        self._weights.enter()

    def leave(self) -> None:
        """Have the source weights in the model, for another method to use it meanwhile."""
        self._weights.leave()

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source weights, by parameter name; adding them restores the bits."""
        return self._weights.delta()

    def drift(self) -> float:
        """Norm of the change since the source over the norm of the source weights."""
        return self._weights.drift()
