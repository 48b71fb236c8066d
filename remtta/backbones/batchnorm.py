"""Statistics of batch norms while a model adapts, and updates of their running statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from remtta.backbones.backbone import BatchNorm
from remtta.errors import counted

Kind = Literal["batch", "recent", "running"]

FEW = 16
"""Smallest batch size at which a batch's statistics need no prior."""

HALF_LIFE = 35
"""Number of images after which an image's weight in the recent statistics has halved."""

_KEEP = 0.5 ** (1 / HALF_LIFE)
RECENT = round(1 / (1 - _KEEP))
"""Total weight of all recent images in the long run."""

PRIOR = 2 * RECENT
"""Weight of the source's statistics beside the recent ones: full corrections overshoot, since a layer's recent
statistics are of times when the layers before it were corrected less. Measured in docs/results.md, "Batch sizes".
"""

_log = logging.getLogger(__name__)


class Moments(NamedTuple):
    """Mean and variance of a layer's channels, shape (C,), and the number of images that they count for."""

    weight: float
    mean: Tensor
    variance: Tensor


class BatchStatistics(TorchFunctionMode):
    """Context in which batch norms in eval mode use the statistics that a method wants.

    A channel's statistics are those of the batch, blended with the running ones as if these came from `prior` further
    images: mean = (n mean_batch + prior mean_running) / (n + prior), and likewise the variance. Gradients flow through
    the batch's. "recent" pools the batch with the images before it, of which the newest count most, and with the
    source's statistics, so that small batches are normalised as large ones are. Outside of the context, the model uses
    its running statistics.

    A mode, since users' batch norms may rearrange their input before they normalise, and users' models may call
    `F.batch_norm` with a layer's tensors; hooks of modules see neither.

    Attributes:
        fixed: Set to True to use the running statistics, where these follow the recent ones.
        moves: True if the running statistics follow the recent ones.
        norms: The batch norms affected, by name.

    Args:
        norms: As above.
        kind: "batch", "recent", or "running" for the running statistics alone.
        prior: Number of images that the source's statistics count for; None for as many as the batch lacks of `FEW`,
            or for `PRIOR`.
        mixes: True if the model has other layers that mix a batch's images.

    Source: prior is N in Improving robustness against common corruptions by covariate shift adaptation,
    arXiv:2006.16971; Tent, arXiv:2006.10726, uses 0.
    """

    def __init__(self, norms: Mapping[str, BatchNorm], kind: Kind, prior: int | None, *, mixes: bool = False) -> None:
        super().__init__()
        self.norms, self._prior = norms, prior
        self._names = {id(norm.running_mean): name for name, norm in norms.items()}
        self._blends = kind == "batch" and bool(norms)
        self._mixes, self.fixed = mixes, False
        self.moves = kind == "recent" and bool(norms)
        self._source = {name: _running(norm, PRIOR if prior is None else prior) for name, norm in norms.items()}
        self._warned_of_few = self._warned_of_parts = False
        self.forget()

    @property
    def mixes(self) -> bool:
        """True if an image's logits depend on the rest of its batch."""
        return self._mixes or self._blends or (self.moves and not self.fixed)

    def forget(self) -> None:
        """Begin with no recent images, or with the model's running statistics if they are no longer the source's."""
        self._num_expected, self._batch, self._earlier = 0, dict[str, Moments](), dict[str, Moments]()
        for name, norm in self.norms.items() if self.moves else ():
            now = _running(norm, RECENT)
            if not now.mean.is_meta and not torch.equal(now.mean, self._source[name].mean):
                self._earlier[name] = now

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.batch_norm:
            return self._normalise(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def begin_batch(self, num_images: int) -> None:
        """Count the next `num_images` among the recent ones, after the batch that they are in."""
        if not self.moves:
            return
        recent = self._recent()
        totals = [moment.sum() for _, *moments in recent.values() for moment in moments]
        if totals and torch.isfinite(torch.stack(totals)).all():  # one synchronisation for all layers
            self._earlier = recent
        self._batch, self._num_expected = {}, num_images

    @property
    def waits(self) -> bool:
        """True while images of the new batch are missing in the recent statistics."""
        return self._num_expected > max((moments.weight for moments in self._batch.values()), default=0)

    @torch.no_grad()
    def set_running_statistics(self) -> None:
        """Set the running statistics to the recent ones, blended with the source's."""
        for name, recent in self._recent().items():
            _, mean, variance = _pooled(recent, self._source[name])
            for buffer, value in zip(_buffers(self.norms[name]), (mean, variance), strict=True):
                buffer.copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Return the recent statistics, on the CPU."""
        state = {}
        for name, (weight, mean, variance) in self._recent().items():
            state[f"bn.{name}.weight"] = torch.tensor(weight, dtype=torch.float64)
            state |= {f"bn.{name}.mean": mean.cpu().clone(), f"bn.{name}.variance": variance.cpu().clone()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._num_expected, self._batch, self._earlier = 0, {}, {}
        for name, source in self._source.items():
            if f"bn.{name}.weight" in state:
                mean, variance = (state[f"bn.{name}.{part}"].to(source.mean) for part in ("mean", "variance"))
                self._earlier[name] = Moments(float(state[f"bn.{name}.weight"]), mean, variance)

    def warn_of_few(self, num_images: int) -> None:
        """Warn once about small batches, unless a prior was chosen."""
        if self._blends and self._prior is None and num_images < FEW and not self._warned_of_few:
            _log.warning(
                "a batch of %s gives unreliable statistics, so the source's count as %d more images; "
                "larger batches are safer, or --set bn=recent in methods that have it",
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
        name = self._names.get(id(running_mean))
        fixed = training or (self.moves and self.fixed)
        if name is None or running_mean is None or running_var is None or fixed:  # not one of these batch norms
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        prior = max(0, FEW - len(input)) if self._prior is None else self._prior
        if self.moves:
            _, mean, variance = self._pooled_with_recent(name, input)
        elif not prior and input.numel() > input.shape[1] and input.is_contiguous():  # see `_moments_by_column`
            return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
        else:
            mean, variance = _Moments.apply(input.to(running_mean.dtype))
            share = len(input) / (len(input) + prior)
            mean, variance = torch.lerp(running_mean, mean, share), torch.lerp(running_var, variance, share)
        # The fused kernel takes constant statistics; the gradients of mean and variance flow through scale and shift.
        fixed_mean, fixed_variance = mean.detach(), variance.detach()
        scale = ((fixed_variance + eps) / (variance + eps)).sqrt() * (1 if weight is None else weight)
        shift = (fixed_mean - mean) * scale * (fixed_variance + eps).rsqrt() + (0 if bias is None else bias)
        out = F.batch_norm(input.to(mean.dtype), fixed_mean, fixed_variance, scale, shift, False, 0.0, eps)
        return out.to(input.dtype)

    def _pooled_with_recent(self, name: str, input: Tensor) -> Moments:
        """Return a layer's statistics of its input and of the images before; record the input's if it is expected."""
        source = self._source[name]
        mean, variance = _Moments.apply(input.to(source.mean.dtype))
        recorded = self._batch.get(name)
        if self._num_expected > (0 if recorded is None else recorded.weight):
            new = Moments(len(input), mean.detach(), variance.detach())
            self._batch[name] = new if recorded is None else _pooled(recorded, new)
        return _pooled(Moments(_total_weight(len(input)), mean, variance), source, *self._aged(name, len(input)))

    def _recent(self) -> dict[str, Moments]:
        """Return the recent statistics by layer, the last batch's included."""
        recent = dict(self._earlier)
        for name, batch in self._batch.items():
            count = round(batch.weight)
            recent[name] = _pooled(batch._replace(weight=_total_weight(count)), *self._aged(name, count))
        return recent

    def _aged(self, name: str, count: int) -> list[Moments]:
        """Return a layer's earlier statistics, if there are any, with their weight after `count` further images."""
        earlier = self._earlier.get(name)
        return [] if earlier is None else [earlier._replace(weight=earlier.weight * _KEEP**count)]


def _buffers(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None and norm.running_var is not None
    return norm.running_mean, norm.running_var


def _running(norm: BatchNorm, weight: int) -> Moments:
    mean, variance = _buffers(norm)
    return Moments(weight, mean.detach().clone(), variance.detach().clone())


def _total_weight(count: int) -> float:
    """Return the weight of this many images, the newest of which counts 1."""
    return float((1 - _KEEP**count) / (1 - _KEEP))


def _pooled(*parts: Moments) -> Moments:
    """Return mean and variance of all images together; those of a single part are unchanged."""
    if len(parts) == 1:
        return parts[0]
    weight = sum(part.weight for part in parts)
    mean = torch.stack([part.weight / weight * part.mean for part in parts]).sum(0)
    spreads = [part.weight / weight * (part.variance + (part.mean - mean).square()) for part in parts]
    return Moments(weight, mean, torch.stack(spreads).sum(0))


class _Moments(torch.autograd.Function):
    """Mean and variance of channels (C,) of an input (B, C, ...), four times as fast as `torch.var_mean` on CPUs."""

    @staticmethod
    def forward(context: Any, input: Tensor) -> tuple[Tensor, Tensor]:
        if input.device.type != "cpu":
            variance, mean = torch.var_mean(input, [0, *range(2, input.ndim)], correction=0)
        elif input.ndim == 4 and not input.is_contiguous():
            mean, variance = _moments_by_column(input)
        else:
            mean, variance = torch.batch_norm_update_stats(input, None, None, 0.0)
        context.save_for_backward(input, mean)
        return mean, variance

    @staticmethod
    def backward(context: Any, to_mean: Tensor, to_variance: Tensor) -> Tensor:
        input, mean = context.saved_tensors
        count, shape = input.numel() / len(mean), (1, -1) + (1,) * (input.ndim - 2)
        slope = to_variance * (2 / count)
        return torch.addcmul((to_mean / count - slope * mean).view(shape), input, slope.view(shape))


def _moments_by_column(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of channels (C,) of channels-last maps (B, C, H, W), by those of their columns.

    Torch adds all pixels of such maps one after another in float32, which loses 1e-3 of the mean in 20 images.
    """
    rows = maps.permute(0, 2, 3, 1).flatten(2)  # (B, H, W C)
    moments = torch.batch_norm_update_stats(rows.unsqueeze(2).permute(0, 3, 1, 2), None, None, 0.0)
    means, variances = (each.unflatten(0, (maps.shape[3], maps.shape[1])) for each in moments)
    between, mean = torch.var_mean(means, 0, correction=0)
    return mean, variances.mean(0) + between


def batch_norms(module: nn.Module) -> dict[str, BatchNorm]:
    """Return the batch norms with running statistics, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm) and layer.running_mean is not None
    }


def uses_batches(module: nn.Module) -> bool:
    """Return True if a module has batch norms without running statistics, which always use the batch's."""
    return any(isinstance(layer, BatchNorm) and layer.running_mean is None for layer in module.modules())


def running_statistics(norms: Mapping[str, BatchNorm]) -> dict[str, Tensor]:
    """Return running means and variances of batch norms, by their names in the model's state."""
    return {
        f"{name}.{part}" if name else part: getattr(layer, part)
        for name, layer in norms.items()
        for part in ("running_mean", "running_var")
    }
