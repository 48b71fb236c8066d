"""Settings of REM."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from remtta.errors import UsageError, check
from remtta.methods.settings.base import MethodConfig, NonNegative, PositiveShare
from remtta.options.option import method_option

Masking = Literal["auto", "attention", "random", "background", "features", "gradcam"]


@dataclass(frozen=True)
class REMConfig(MethodConfig):
    """Settings of Ranked Entropy Minimization; the defaults are the paper's for ImageNet-C.

    Attributes:
        mask_ratios: Fractions of patch tokens to mask, one per view: 0 first, ascending, each in [0, 1). The paper's
            M_N.
        ranking_weight: Weight of the entropy ranking loss, the paper's lambda (Eq. 5).
        margin: Required entropy gap between every pair of views (Eq. 4), as a fraction of log C so that one value suits
            any number of classes C.
        consistency_weight: Weight of the masked consistency loss, 1 in the paper (Eq. 5). 0 turns it off
            ("Effect of Each Component"); it and ranking_weight cannot both be 0.
        masking: The patch tokens that masked views remove: "attention", those with the most attention from the class
            token or an attention pool (Eq. 2); "background", those with the least, or "random" ("Effect of Masking
            Strategy"); "features", those with the largest L2 norm, which needs no softmax attention (REM-FA,
            "Experiments on Different Network Architectures"); "gradcam", those that contribute most to the predicted
            class (ibid.); or "auto", attention if the model has it, else features. Each view also removes all patches
            that less masked views remove.
        confident_below: Learn only from images whose unmasked prediction has an entropy below this fraction of log C;
            the others count with a loss of zero. None for every image. The paper's active sample criterion
            ("Comparison with Augmentation-based EM approaches"), which gives no threshold; EATA's is 0.4.

    The others are those of `MethodConfig`.

    Raises:
        UsageError: If a value is out of range; the message names it.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """

    mask_ratios: Annotated[
        tuple[float, ...],
        method_option(
            "Fractions of patch tokens to mask, 0 first.", metavar="0,A,B", default="remtta 0,0.2, rem 0,0.1,0.2"
        ),
    ] = (0.0, 0.1, 0.2)
    ranking_weight: Annotated[
        NonNegative,
        method_option("Weight of the entropy ranking loss.", flags=("--lambda",), default="remtta 2, rem 1"),
    ] = 1.0
    margin: Annotated[
        NonNegative,
        method_option("Required entropy gap between views, as a fraction of log C.", default="remtta 1, rem 0"),
    ] = 0.0
    consistency_weight: NonNegative = 1.0
    masking: Masking = "auto"
    confident_below: PositiveShare | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask_ratios", tuple(float(ratio) for ratio in self.mask_ratios))
        _check_mask_ratios(self.mask_ratios)
        super().__post_init__()
        weights = self.consistency_weight, self.ranking_weight
        check(max(weights) > 0, "consistency_weight", self.consistency_weight, "> 0 where lambda is 0")


def _check_mask_ratios(ratios: tuple[float, ...]) -> None:
    shown = ",".join(f"{ratio:g}" for ratio in ratios)
    if len(ratios) < 2 or ratios[0] != 0.0:
        raise UsageError(f"mask ratios must start with 0 and name at least one masked view, got {shown or 'none'}")
    if not all(less < more for less, more in pairwise(ratios)) or not ratios[-1] < 1:
        percent = ",".join(f"{ratio / 100:g}" for ratio in ratios)
        hint = f"; they are fractions: {percent}?" if 1 < ratios[-1] < 100 else ""
        raise UsageError(f"mask ratios must ascend within [0, 1), got {shown}{hint}")
