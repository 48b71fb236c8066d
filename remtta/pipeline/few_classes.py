"""The part of the mean logits that is due to few classes in a stream, as pure functions.

They are the formulas of docs/guard.md, with its names. All values are float64: in float32, the variance of nearly equal
predictions is rounding noise.
"""

from __future__ import annotations

from torch import Tensor

from remtta.pipeline.temperature import share_of

HALF_LIFE = 35  # images, of mean logits and probabilities; short, to follow a change of conditions
VIEW_EVERY = 16  # one image in this many is also seen with shuffled patches, for 6 % of a forward pass
EVIDENCE_HALF_LIFE = 200  # images, of the mean certainties; long, to be stable
LOST_RANGE = (0.1, 0.2)  # the classes' part starts to stay, and stays completely; shuffled streams lose about 0.09
COMMON_RANGE = (0.4, 0.8)  # with few classes: the mean starts to stay, and stays completely; 0.3 in runs of 25 frames
CLASS_LOGIT = 10.0  # of the shown class above the others: probability 0.96 among 1,000 classes
DOUBT_RANGE = (0.85, 0.95)  # certainty relative to the source's; 1.2 to 1.6 where one of ten classes gains
MAX_LEFT = 0.75  # bound on `left`, whose complement is a divisor
_TINY = 1e-9  # bound on divisors


def find_shift(z: Tensor, v: Tensor, w: Tensor, vv: Tensor, vw: Tensor) -> Tensor:
    """Return the offset of the shift alone (C,), up to a constant, as far as it explains the mean logits.

    It is that of the images with views: whatever else the others show, they have the same offset.

    Args:
        z: Mean logits, shape (C,).
        v: Mean logits of the images that are also seen with shuffled patches, shape (C,).
        w: Mean logits of these views, shape (C,).
        vv: Mean of v . v over these images, a scalar.
        vw: Mean of v . w.
    """
    left = (vw - v @ w) / (vv - v @ v).clamp(min=_TINY * (1 + vv))  # 0 of a single view, not rounding noise
    shift = v - (v - w) / (1 - left.clamp(0, MAX_LEFT))
    shift = shift - shift.mean()
    return (shift @ z / (shift @ shift).clamp(min=_TINY)).clamp(0, 1) * shift


def class_part(p: Tensor) -> Tensor:
    """Return the part of the mean logits (C,) that is due to the classes shown, by the mean probabilities (C,)."""
    return CLASS_LOGIT * (p - 1 / len(p))


def fraction_unknown(z: Tensor, zz: Tensor, shift: Tensor) -> Tensor:
    """Return the fraction of the mean logits that stays if there are few classes, 0 to 1.

    Frames that all show the same say little about the shift. They have most of what is beyond the shift in common.

    Args:
        z: Mean logits, shape (C,).
        zz: Mean of z . z of a frame, less its mean over classes, a scalar.
        shift: As returned by `find_shift`.
    """
    z = z - z.mean()
    common = (z - shift).square().sum()
    low, high = COMMON_RANGE
    return ((common / (zz - z @ z + common).clamp(min=_TINY) - low) / (high - low)).clamp(0, 1)


def evidence_of_few(pp: Tensor, cc: Tensor, num_classes: int) -> Tensor:
    """Return the evidence of few classes: at 0, their part starts to stay in the logits; from 1 on, all of it stays.

    Args:
        pp: Mean of p . p, with probabilities p without the shift, a scalar.
        cc: Mean of c . c, with probabilities c without the mean logits.
    """
    low, high = LOST_RANGE
    lost = 1 - (cc - 1 / num_classes) / (pp - 1 / num_classes).clamp(min=_TINY)
    return (lost - low) / (high - low)


def fraction_doubted(evidence: Tensor, rr: Tensor, qq: Tensor, num_classes: int) -> Tensor:
    """Return the fraction of the offset for few classes that is not subtracted, 0 to 1.

    Predictions of clearly few classes that it makes less certain are rarely better. With many classes to choose from
    this says nothing: where a shift makes the source model too sure, better predictions are less certain, too.

    Args:
        evidence: Of few classes, a scalar.
        rr: Mean of r . r, with the source model's probabilities r, a scalar.
        qq: Mean of q . q, with probabilities q without this offset.
    """
    low, high = DOUBT_RANGE
    certainty = (qq - 1 / num_classes) / (rr - 1 / num_classes).clamp(min=_TINY)
    doubted = (evidence - 1).clamp(0, 1) * ((high - certainty) / (high - low)).clamp(0, 1)
    return (1 - share_of(num_classes) ** 2) * doubted
