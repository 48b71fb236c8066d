"""Centred logits: subtract the offset that a distribution shift adds to all logits.

Under a shift the features of all images move in the same direction, so the last linear layer adds the same offset to
every image's logits: C numbers, estimated by the running mean of the logits. That mean also contains the stream's own
classes; if recent images are of few classes, this part is estimated from the model's answers and stays in the logits.
A shift towards one class is told from images of it by views with shuffled patches, which have the shift, but little of
the class.

Related: NEO (arXiv:2510.05635) centres the features of a whole domain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from remtta.models.weights import within

HALF_LIFE = 35
"""Half-life of an image in the mean, in images; small, so that the mean follows a change of conditions."""

EVERY = 16
"""Number of images, one of which is also seen with shuffled patches."""

_MEMORY = 1000  # half-life of the evidence of few classes, in images
_NOW = 1 / 4  # factor on the evidence in the window alone, which is noisier
_PRIOR = 200  # images without evidence before the first: few images can agree by chance
_FEW = (0.0063, 0.019)  # evidence: the part of the shown classes starts to stay in the logits, and stays completely
_FACTOR = 1.2  # on that part, which a linear fit underestimates
_SHARE = 0.15  # of the shift that is taken out for that part, while the effect of shuffling is not known
_EFFECT = 7  # views after which half of this effect is known
_SLOPE = (5.0, 30.0)  # logits: bounds on the slope of that fit; if images hardly vary, there is nothing to fit it to
_MOST_LEFT = 0.75  # bound on the fraction of an image's own logits that is left when its patches are shuffled
_TINY = 1e-9  # bound on divisors

Shuffled = Callable[[Tensor], Tensor]
"""Returns the logits (K, C) of images at indices (K,) of a batch, with their patches shuffled."""


class Centre:
    """The offset of a model's logits, updated from batch to batch.

    The mean of the logits z is the offset of the shift plus a part of the classes shown. The latter is estimated by
    linear regression on the answers p = softmax(z - share * shift), as cov(z, p) / var(p) * (mean p - 1 / C). It stays
    in the logits if recent images are of few classes: if answers to different images agree, and lose certainty without
    it. An adapted model's logits are then centred by the source model's offset, so that what it has learned of these
    classes is not subtracted.

    The shift in p is the mean logits of views with shuffled patches, less the fraction of an image's own logits that
    is left in its view, as far as these explain the mean of z. Shuffling itself also favours some classes; this effect
    is learned while the stream shows many classes, and subtracted. Whether there are few is decided with the whole
    shift, and what stays of them with a share of it, which grows as the effect becomes known: on a stream of one class,
    an unknown effect can look like that class. Without views, p = softmax(z).

    Logits are centred at 0, not at the head's bias: over clean images of all classes the mean logits are near 0, even
    if the bias is large, as in a linear probe, where it compensates for the mean of the features.

    Attributes:
        offset: The values to subtract from logits (..., C): shape (C,), or 0 before the first batch.
        few: The fraction of the shown classes' part that stays in the logits, a scalar, 0 to 1.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._place = torch.device("cpu") if device.type == "mps" else device  # MPS has no doubles
        self._parts: list[Tensor] = []
        self._expected: Tensor | None = None
        self._shuffled: Shuffled | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all means and the offset."""
        self.offset = torch.zeros((), device=self._device)
        self.few = self._corrected = torch.zeros((), device=self._place, dtype=torch.float64)
        self._led = torch.zeros((), dtype=torch.bool)  # by the source model's centre
        self._since = 0  # images since the last one that was also seen with shuffled patches, modulo EVERY
        self._means = {name: _Mean(HALF_LIFE) for name in ("window", "answers", "unshifted", "corrected")}
        self._means |= {"views": _Mean(HALF_LIFE / EVERY), "effect": _Mean(_MEMORY / EVERY), "evidence": _Mean(_MEMORY)}

    def expect(self, fit: Tensor, shuffled: Shuffled | None = None) -> None:
        """Start a new batch, whose logits come next; the mask (B,) selects images that count in the means."""
        self._expected, self._parts, self._shuffled = fit, [], shuffled

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
        counted = fit & torch.isfinite(whole).all(1).cpu()
        if counted.any():
            places = counted.nonzero().flatten()
            whole = whole.to(self._place).double()  # in floats, the variance of nearly equal answers is rounding noise
            self._follow(whole[places.to(whole.device)], places)
        self._shuffled = None  # which holds the batch's images

    def follow(self, source: Centre) -> None:
        """Use the source model's evidence of few classes, and its offset for them, for the next batch.

        By the adapted model's own answers, a class that wrongly dominates would look like one that the stream shows.
        """
        self.few, self._corrected = source.few, source._corrected
        self._led = torch.ones((), dtype=torch.bool)

    def _follow(self, logits: Tensor, places: Tensor) -> None:
        window = self._means["window"]
        (z,) = window.add(logits)
        if not self._led:
            shift = self._shift(z, logits, places)
            shown = self._shown("unshifted", logits, z, shift)
            self.few = self._few_classes((logits - z).softmax(-1), (logits - z + shown).softmax(-1))
            share = _SHARE + (1 - _SHARE) * self._means["effect"].known(_EFFECT)
            self._corrected = z - _FACTOR * self._shown("answers", logits, z, share * shift)
        offset = (1 - window.alike) * torch.lerp(z, self._corrected, self.few)
        self.offset = offset.to(self._device, torch.float32)

    def _shown(self, name: str, logits: Tensor, mean: Tensor, shift: Tensor) -> Tensor:
        """Return the part of the mean (C,) that is due to the classes shown, by the answers to logits without a shift.

        Args:
            name: The running means of these answers.
            logits: New images' logits, shape (B, C).
            mean: The running mean of the logits, shape (C,).
            shift: What is subtracted from the logits first, shape (C,).
        """
        answers = (logits - shift).softmax(-1)
        each = answers, ((logits - mean) * answers).sum(-1), answers.square().sum(-1)
        p, zp, pp = self._means[name].add(*each)
        if self._means["window"].alike > 0.9:  # one image shows no agreement
            return torch.zeros_like(p)
        slope = (zp / (pp - p @ p).clamp(min=_TINY)).clamp(*_SLOPE)
        return slope * (p - 1 / len(p))

    def _shift(self, mean: Tensor, logits: Tensor, places: Tensor) -> Tensor:
        """Return the offset of the shift alone (C,), as far as it explains the mean of the logits, up to a constant.

        Args:
            mean: The running mean of the logits, shape (C,).
            logits: New images' logits, shape (B, C).
            places: Their indices in the batch, shape (B,).
        """
        seen, effect = self._means["views"], self._means["effect"]
        if self._shuffled is not None:
            chosen = torch.arange(len(logits))[-self._since % EVERY :: EVERY]
            self._since = (self._since + len(logits)) % EVERY
            views = self._shuffled(places[chosen]).to(logits) if len(chosen) else logits[:0]
            finite = torch.isfinite(views).all(1)
            if finite.any():
                own, views = logits[chosen.to(logits.device)][finite], views[finite]
                seen.add(own, views, own.square().sum(-1), (own * views).sum(-1))
                effect.remove(float(self.few) * len(views))
                if not self.few:
                    effect.add(views - own)
        if not seen.values:
            return torch.zeros_like(mean)
        own, views, square, product = seen.values
        left = (product - own @ views) / (square - own @ own).clamp(min=_TINY)
        if effect.values:
            views = views - effect.known(_EFFECT) * effect.values[0]
        shift = mean - (own - views) / (1 - left.clamp(0, _MOST_LEFT))
        shift = shift - shift.mean()
        return (shift @ mean / (shift @ shift).clamp(min=_TINY)).clamp(0, 1) * shift

    def _few_classes(self, centred: Tensor, corrected: Tensor) -> Tensor:
        """Return how much recent images look like few classes, 0 to 1.

        Args:
            centred: Answers with the whole mean subtracted, shape (B, C).
            corrected: Answers that keep the part of the shown classes, likewise.
        """
        count, classes = centred.shape
        window = self._means["corrected"]
        mean, square, left = window.add(corrected, corrected.square().sum(-1), centred.square().sum(-1))
        certainty = torch.stack([square, left]) - 1 / classes
        now = torch.cat([torch.stack(_agreement(mean, square, window.alike)), certainty])
        (memory,), known = self._means["evidence"].add(now.expand(count, 4)), self._means["evidence"].known(_PRIOR)
        evidence = torch.maximum(known * _evidence(memory), _NOW * _evidence(now))
        low, high = _FEW
        return ((evidence - low) / (high - low)).clamp(0, 1)

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next offset depends on, on the CPU."""
        own = {"offset": self.offset, "corrected": self._corrected, "few": self.few, "led": self._led}
        own["since"] = torch.tensor(self._since)
        means = {f"{name}.{key}": value for name, mean in self._means.items() for key, value in mean.state().items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in {**own, **means}.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.forget()
        self.offset = state["offset"].to(self._device)
        self._corrected, self.few = (state[name].to(self._place).double() for name in ("corrected", "few"))
        self._led, self._since = state["led"], int(state["since"])
        for name, mean in self._means.items():
            mean.load_state(within(f"{name}.", state), self._place)


class _Mean:
    """An exponentially weighted mean over images, whose weights are halved after `half_life` further images.

    Attributes:
        weight: The sum of the images' weights, the last of which is 1.
    """

    def __init__(self, half_life: float) -> None:
        self._keep = 0.5 ** (1 / half_life)
        self.weight = 0.0
        self._sums: list[Tensor] = []

    def add(self, *values: Tensor) -> list[Tensor]:
        """Add a batch's values (B, ...), of one or more kinds; return the mean of each kind."""
        count, keep = len(values[0]), self._keep
        weights = keep ** torch.arange(count - 1, -1, -1, device=values[0].device, dtype=values[0].dtype)
        self.weight = keep**count * self.weight + (1 - keep**count) / (1 - keep)
        sums = self._sums or [torch.zeros_like(value[0]) for value in values]
        self._sums = [keep**count * summed + weights @ value for summed, value in zip(sums, values, strict=True)]
        return self.values

    def remove(self, weight: float) -> None:
        """Remove as much weight, if there is, from all images alike."""
        left = max(0.0, self.weight - weight)
        self._sums = [left / max(self.weight, _TINY) * summed for summed in self._sums]
        self.weight = left

    def known(self, prior: float) -> float:
        """Return the share of the weights, 0 to 1, beside `prior` images without evidence."""
        return self.weight / (self.weight + prior)

    @property
    def values(self) -> list[Tensor]:
        """The mean of each kind; none before the first image."""
        return [summed / max(self.weight, _TINY) for summed in self._sums]

    @property
    def alike(self) -> float:
        """Probability that two draws from it are the same image: the sum of squared weights."""
        return (2 / self.weight - (1 - self._keep)) / (1 + self._keep)

    def state(self) -> dict[str, Tensor]:
        """Return everything it holds."""
        sums = {str(number): summed for number, summed in enumerate(self._sums)}
        return {"weight": torch.tensor(self.weight, dtype=torch.float64), **sums}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore what `state` returned."""
        self.weight = float(state["weight"])
        self._sums = [state[str(number)].to(device) for number in range(len(state) - 1)]


def _agreement(mean: Tensor, square: Tensor, alike: float) -> tuple[Tensor, Tensor]:
    """Return the squared part that answers to different images share beyond 1 / C, and their variance; both unbiased.

    Of the answers' probabilities, these are the mean (C,) and the mean sum of squares; two are of the same image with
    probability `alike`.
    """
    spread = (square - mean.square().sum()) / max(1 - alike, 0.5)
    common = mean.square().sum() - 1 / len(mean) - alike * spread
    return common.clamp(min=0), spread.clamp(min=_TINY)


def _evidence(parts: Tensor) -> Tensor:
    """Return the agreement of answers times the certainty that is lost by centring, from means of both, shape (4,)."""
    common, spread, certainty, left = parts
    return common / (common + spread) * (1 - left / certainty.clamp(min=_TINY)).clamp(min=0)
