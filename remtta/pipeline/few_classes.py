"""How much of the mean logits is due to few classes in a stream, as pure functions.

They are the formulas of docs/guard.md, with its names. All values are float64: in float32, the variance of nearly equal
predictions is rounding noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_LIFE = 35  # images, of all means; short, to follow a change of conditions
VIEW_EVERY = 16  # one image in this many is also seen with shuffled patches, for 6 % of a forward pass
EVIDENCE_HALF_LIFE = 1000  # images; of evidence, and of the effect of shuffling; long, since a window is noisy
EVIDENCE_PRIOR = 200  # images without evidence before the first: few images can agree by chance
EVIDENCE_NOW = 1 / 4  # factor on the evidence in the window alone, as it is noisier
EVIDENCE_RANGE = (0.0063, 0.019)  # the part starts to stay, and stays completely; shuffled streams have at most 0.009
EFFECT_PRIOR = 7  # views after which half of the effect of shuffling is known
UNKNOWN_SHARE = 0.15  # of the shift that is subtracted while the effect is unknown: the effect can look like a class
FACTOR = 1.2  # makes up for what a linear fit leaves out
SLOPE_RANGE = (5.0, 30.0)  # logits; if images hardly vary, there is nothing to fit a slope to
MAX_LEFT = 0.75  # bound on `left`, whose complement is a divisor
TINY = 1e-9  # bound on divisors


def shift(z: Tensor, v: Tensor, w: Tensor, vv: Tensor, vw: Tensor, effect: Tensor) -> Tensor:
    """Return the offset of the shift alone (C,), up to a constant, as far as it explains the mean logits.

    Args:
        z: Mean logits, shape (C,).
        v: Mean logits of the images that are also seen with shuffled patches, shape (C,).
        w: Mean logits of these views, shape (C,).
        vv: Mean of v . v over these images, a scalar.
        vw: Mean of v . w.
        effect: The known part of the effect of shuffling, shape (C,).
    """
    left = (vw - v @ w) / (vv - v @ v).clamp(min=TINY)
    offset = z - (v - (w - effect)) / (1 - left.clamp(0, MAX_LEFT))
    offset = offset - offset.mean()
    return (offset @ z / (offset @ offset).clamp(min=TINY)).clamp(0, 1) * offset


def shown(p: Tensor, zp: Tensor, pp: Tensor) -> Tensor:
    """Return the part of the mean logits (C,) that is due to the classes shown, by linear regression on predictions.

    Args:
        p: Mean probabilities, shape (C,).
        zp: Mean of (z - mean z) . p, a scalar.
        pp: Mean of p . p.
    """
    slope = (zp / (pp - p @ p).clamp(min=TINY)).clamp(*SLOPE_RANGE)
    return slope * (p - 1 / len(p))


def agreement_and_certainty(q: Tensor, qq: Tensor, centered: Tensor, same: float) -> Tensor:
    """Return what `evidence` needs, shape (4,): agreement and its spread, certainty with and without the part.

    Args:
        q: Mean probabilities that keep the part of the shown classes, shape (C,).
        qq: Mean of q . q, a scalar.
        centered: The same mean with the whole mean subtracted from the logits.
        same: Probability that two images drawn from the means are the same one.
    """
    spread = (qq - q.square().sum()) / max(1 - same, 0.5)  # both are unbiased
    common = q.square().sum() - 1 / len(q) - same * spread
    certainty = torch.stack([qq, centered]) - 1 / len(q)
    return torch.cat([torch.stack([common.clamp(min=0), spread.clamp(min=TINY)]), certainty])


def evidence(means: Tensor) -> Tensor:
    """Return the evidence of few classes, from means (4,) of `agreement_and_certainty`: agreement * lost."""
    common, spread, certainty, centered = means
    return common / (common + spread) * (1 - centered / certainty.clamp(min=TINY)).clamp(min=0)


def few(found: Tensor) -> Tensor:
    """Return the fraction of the shown classes' part that stays in the logits, 0 to 1, by the evidence."""
    low, high = EVIDENCE_RANGE
    return ((found - low) / (high - low)).clamp(0, 1)
