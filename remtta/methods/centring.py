"""Centred logits: subtract the offset that a distribution shift adds to all logits.

Under a shift the features of all images move in the same direction, so the last linear layer adds the same offset to
every image's logits: C numbers, estimated by the running mean of the logits. That mean also contains the stream's own
classes; this part is estimated from the model's answers and excluded.

Related: NEO (arXiv:2510.05635) centres the features of a whole domain.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HALF_LIFE = 35
"""Half-life of an image in the mean, in images; small, so that the mean follows a change of conditions."""

_RECENT, _MEMORY = 100, 1000  # half-lives of the agreement, which shows whether windows hold few classes
_FEW = (0.16, 0.32)  # agreement times sqrt(C): label correction starts, and is complete
_FEW_NOW = (0.24, 0.48)  # the same within the window, whose estimate is noisier
_ONE = (0.05, 0.5)  # agreement a + b / C of the plain answers: centring starts to fade; it is off at twice that
_KEPT = {"plain": (0.8, 0.9), "plain recent": (0.55, 0.65)}  # centred spread / plain certainty: centre after all
_MIN_CERTAINTY = 0.15  # of the plain answers, in that ratio; less is mostly noise
_MIN_SQUARE = 1e-9


class Centre:
    """The offset of a model's logits, updated from batch to batch.

    The mean of the logits z is the offset of the shift plus a part due to the labels. The latter is estimated from the
    centred answers q = softmax(z - offset), as slope * (mean q - 1 / C) with slope = cov(z, q) / var(q). It stays in
    the logits to the degree that answers to different images agree, as they do if windows hold few classes. If the
    plain answers to the last 1,000 or 100 images agree (one class), nothing is centred, unless the centred answers
    still differ from each other nearly as much as the plain ones are certain.

    Logits are centred at 0, not at the head's bias: over clean images of all classes the mean logits are near 0, even
    if the bias is large, as in a linear probe, where it compensates for the mean of the features.

    Attributes:
        offset: The values to subtract from logits (..., C): shape (C,), or 0 before the first batch.
        share: The fraction of the shift that is subtracted, a scalar, 0 to 1.

    Args:
        device: The device of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Tensor] = []
        self._expected: Tensor | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all means and the offset."""
        self.offset = self._shift = torch.zeros((), device=self._device)
        self.share = torch.ones((), device=self._device)
        self._led = torch.zeros((), dtype=torch.bool)  # by the source model's answers
        self._answers: Tensor | None = None  # to the last batch, (B, C)
        self._told: Tensor | None = None  # the source model's to the next one
        self._means = {
            "window": _Mean(HALF_LIFE),
            "recent": _Mean(_RECENT),
            "memory": _Mean(_MEMORY),
            "plain": _Mean(_MEMORY),
            "plain recent": _Mean(_RECENT),
        }

    def expect(self, fit: Tensor) -> None:
        """Start a new batch, whose logits come next; the mask (B,) selects images that count in the means."""
        self._expected, self._parts = fit, []

    @property
    def waits(self) -> bool:
        """True while logits of a new batch are missing."""
        return self._expected is not None

    @torch.no_grad()
    @torch.inference_mode(False)
    def note(self, logits: Tensor) -> None:
        """Record a new batch's logits (B, C) as returned by the classifier, or the next part of them."""
        if self._expected is None:
            return
        self._parts.append(logits.detach().float().clone())
        if sum(map(len, self._parts)) < len(self._expected):
            return
        fit, whole = self._expected, torch.cat(self._parts)
        self._expected, self._parts = None, []
        counted = fit.to(whole.device) & torch.isfinite(whole).all(1)
        if counted.any():
            self._follow(whole[counted])

    def follow(self, source: Centre) -> None:
        """Use the source model's answers and share for the next batch.

        With the adapted model's own answers, a class that wrongly dominates would look like one that the stream shows.
        """
        self._told, self.share = source._answers, source.share
        self._led = torch.ones((), dtype=torch.bool)

    def _follow(self, logits: Tensor) -> None:
        count, classes = logits.shape
        told = self._told
        answers = (logits - self._shift).softmax(-1) if told is None or len(told) != count else told
        self._answers, self._told = answers, None
        window = self._means["window"]
        z, q, zq, qq = window.add(logits, answers, (logits * answers).sum(-1), answers.square().sum(-1))
        common, spread = _agreement(q, qq, window.alike)
        told = torch.stack([common, spread, (zq - z @ q).clamp(min=0) / (1 - window.alike)])
        (recent,), (memory,) = (self._means[name].add(told.expand(count, 3)) for name in ("recent", "memory"))
        now, *longer = (each[0] / (each[0] + each[1]) * classes**0.5 for each in (told, recent, memory))
        few = torch.maximum(_ramp(now, *_FEW_NOW), _ramp(torch.maximum(*longer), *_FEW))
        slope = torch.minimum(*(each[2] / each[1] for each in (told, memory)))
        self._shift = z - few * slope * (q - 1 / classes)
        if not self._led:
            plain, spreads = logits.softmax(-1), {"plain": memory[1], "plain recent": recent[1]}
            self.share = torch.minimum(*(self._share_in(name, plain, spread) for name, spread in spreads.items()))
        self.offset = self.share * self._shift

    def _share_in(self, name: str, answers: Tensor, centred_spread: Tensor) -> Tensor:
        """Return the share to subtract: 0 for one class.

        Args:
            name: The mean to which these plain answers (B, C) are added.
            answers: Shape (B, C).
            centred_spread: The spread of centred answers, over as many images as the mean.
        """
        plain, classes = self._means[name], answers.shape[1]
        mean, square = plain.add(answers, answers.square().sum(-1))
        common, spread = _agreement(mean, square, plain.alike)
        bound = _ONE[0] + _ONE[1] / classes
        one = _ramp(common / (common + spread), bound, 2 * bound)
        kept = centred_spread / (square - 1 / classes).clamp(min=_MIN_CERTAINTY)
        return torch.maximum(1 - one, _ramp(kept, *_KEPT[name]))

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next offset depends on, on the CPU."""
        own = {"offset": self.offset, "shift": self._shift, "share": self.share, "led": self._led}
        means = {f"{name}.{key}": value for name, mean in self._means.items() for key, value in mean.state().items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in {**own, **means}.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.forget()
        device = self._device
        self.offset, self._shift, self.share = (state[name].to(device) for name in ("offset", "shift", "share"))
        self._led = state["led"]
        for name, mean in self._means.items():
            start = f"{name}."
            mean.load_state({key.removeprefix(start): state[key] for key in state if key.startswith(start)}, device)


class _Mean:
    """An exponentially weighted mean over images.

    Args:
        half_life: Number of images after which an image's weight is halved.
    """

    def __init__(self, half_life: int) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self._weight = 0.0
        self._sums: list[Tensor] = []

    def add(self, *values: Tensor) -> list[Tensor]:
        """Add a batch's values (B, ...), of one or more kinds; return the mean of each kind."""
        count, keep = len(values[0]), self._keep
        weights = keep ** torch.arange(count - 1, -1, -1, device=values[0].device, dtype=values[0].dtype)
        self._weight = keep**count * self._weight + (1 - keep**count) / (1 - keep)
        sums = self._sums or [torch.zeros_like(value[0]) for value in values]
        self._sums = [keep**count * summed + weights @ value for summed, value in zip(sums, values, strict=True)]
        return [summed / self._weight for summed in self._sums]

    @property
    def alike(self) -> float:
        """Probability that two draws from it are the same image: the sum of squared weights, at most 1/2."""
        return float(min((2 / self._weight - (1 - self._keep)) / (1 + self._keep), 0.5))

    def state(self) -> dict[str, Tensor]:
        """Return everything it holds."""
        sums = {str(number): summed for number, summed in enumerate(self._sums)}
        return {"weight": torch.tensor(self._weight, dtype=torch.float64), **sums}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Go on from what `state` returned."""
        self._weight = float(state["weight"])
        self._sums = [state[str(number)].to(device) for number in range(len(state) - 1)]


def _agreement(mean: Tensor, square: Tensor, alike: float) -> tuple[Tensor, Tensor]:
    """Return the squared part that answers to different images share beyond 1 / C, and their variance; both unbiased.

    Args:
        mean: Mean of the answers' probabilities, shape (C,).
        square: Mean of their sums of squares, a scalar.
        alike: Probability that two of them are of the same image.
    """
    spread = (square - mean.square().sum()) / (1 - alike)
    common = mean.square().sum() - 1 / len(mean) - alike * spread
    return common.clamp(min=0), spread.clamp(min=_MIN_SQUARE)


def _ramp(value: Tensor, low: float, high: float) -> Tensor:
    return ((value - low) / (high - low)).clamp(0, 1)
