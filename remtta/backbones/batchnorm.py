"""Statistics of batch norms while a model adapts, and updates of their running statistics."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from remtta.backbones.backbone import BatchNorm
from remtta.errors import counted
from remtta.models.precision import Context

FEW = 16
"""Batch size from which on a batch's statistics need no prior."""

_log = logging.getLogger("remtta")


class BatchStatistics(TorchFunctionMode):
    """Context in which batch norms in eval mode use the statistics that a method wants.

    A channel's statistics are those of the batch, blended with the running ones as if these came from `prior` further
    images: mean = (n mean_batch + prior mean_running) / (n + prior), and likewise the variance. Gradients flow through
    the batch's. Outside of the context, the model uses its running statistics.

    Attributes:
        mixes: True if an image's logits depend on the rest of its batch.

    Args:
        norms: The batch norms affected, by name.
        kind: "batch", or "running" for the running statistics alone.
        prior: Number of images that the running statistics count for; None for as many as the batch lacks of `FEW`.

    Source: prior is N in Improving robustness against common corruptions by covariate shift adaptation,
    arXiv:2006.16971; Tent, arXiv:2006.10726, uses 0.
    """

    def __init__(self, norms: Mapping[str, BatchNorm], kind: Literal["batch", "running"], prior: int | None) -> None:
        super().__init__()
        self._norms = norms
        self.mixes = kind == "batch" and bool(norms)
        self._prior = prior
        self._names = {id(norm.running_mean): name for name, norm in norms.items()}
        self._noted: dict[str, tuple[Tensor, Tensor]] = {}
        self._noting = self._warned_of_few = self._warned_of_parts = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._normalise(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def around(self, context: Context) -> Context:
        """Return a context that combines `context` with this one; only `context` if there are no batch norms."""
        if not self._norms:
            return context

        @contextlib.contextmanager
        def both(device: torch.device) -> Iterator[None]:
            with context(device), self:
                yield

        return both

    def begin(self) -> None:
        """Record the statistics of each layer's next batch, for `follow`."""
        self._noted, self._noting = {}, True

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the running statistics by this share towards the recorded ones."""
        self._noting = False
        for name, (mean, variance) in self._noted.items():
            running = self._norms[name]
            assert running.running_mean is not None and running.running_var is not None
            running.running_mean.lerp_(mean, momentum)
            running.running_var.lerp_(variance, momentum)

    def warn_of_few(self, num_images: int) -> None:
        """Warn once about small batches, unless a prior was chosen."""
        if self.mixes and self._prior is None and num_images < FEW and not self._warned_of_few:
            _log.warning(
                "batch statistics of %s are poor, so the source's count as %d more images; "
                "larger batches or --set bn=running are safer",
                counted(num_images, "image"),
                FEW - num_images,
            )
        self._warned_of_few = True

    def warn_of_parts(self) -> None:
        """Warn once that batches are split into parts."""
        if self.mixes and not self._warned_of_parts:
            _log.warning(
                "batch norms normalise each micro-batch by its own statistics, so the update is not the whole batch's"
            )
        self._warned_of_parts = True

    def _normalise(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if running_mean is None or running_var is None or training:  # it has no running statistics
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if self._noting:
            self._note(input, running_mean)
        prior = max(0, FEW - len(input)) if self._prior is None else self._prior
        if not self.mixes:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        if not prior and input.numel() > input.shape[1]:
            return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
        share = len(input) / (len(input) + prior)
        exact = input.to(running_mean.dtype)
        variance, mean = torch.var_mean(exact, _others(input), correction=0)
        mean, variance = torch.lerp(running_mean, mean, share), torch.lerp(running_var, variance, share)
        scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
        shift = -mean * scale + (0 if bias is None else bias)
        shape = (1, -1) + (1,) * (input.ndim - 2)
        return torch.addcmul(shift.view(shape), exact, scale.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _note(self, input: Tensor, running_mean: Tensor) -> None:
        name = self._names.get(id(running_mean))
        count = input.numel() // input.shape[1]
        if name is not None and name not in self._noted and count > 1:
            variance, mean = torch.var_mean(input.to(running_mean.dtype), _others(input))
            self._noted[name] = mean, variance


def _others(input: Tensor) -> list[int]:
    """Return all axes except the channels'."""
    return [0, *range(2, input.ndim)]


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the batch norms with running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }


def running_statistics(norms: Mapping[str, BatchNorm]) -> dict[str, Tensor]:
    """Return running means and variances of batch norms, by their names in the model's state."""
    return {
        f"{name}.{part}" if name else part: getattr(layer, part)
        for name, layer in norms.items()
        for part in ("running_mean", "running_var")
    }
