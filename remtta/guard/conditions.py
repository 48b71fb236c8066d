"""Detect changes of condition, such as nightfall or fog, from plain image statistics.

Statistics are brightness, spread of colours, and roughness at four scales. They cost next to nothing and, unlike a
model's own features, do not change with the adapted weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_STEADY = 1000  # frames over which means are taken
_SCALES = 4
_BLOCK = 20  # minimum number of frames compared together
_NEAR, _CHANCE = 0.25, 4.0  # squared distance within a condition; allowance over the number of frames
_LEAST_SPREAD = 0.01  # minimum variance of a statistic between frames of one condition
_DARK = 1e-3


def statistics(pixels: Tensor) -> Tensor:
    """Return the statistics (B, D) of images (B, 3, H, W), on the CPU.

    They are the mean and log standard deviation of each colour, and the log mean difference of horizontal and vertical
    neighbours at each scale.
    """
    pixels = pixels.float()
    found = [pixels.mean((2, 3)), pixels.std((2, 3)).clamp(min=_DARK).log()]
    grey = pixels.mean(1, keepdim=True)
    for _ in range(_SCALES):
        if min(grey.shape[2:]) < 2:
            break
        for axis in (2, 3):
            found.append(grey.diff(dim=axis).abs().mean((2, 3)).clamp(min=_DARK).log())
        grey = F.avg_pool2d(grey, 2)
    return torch.cat(found, dim=1).double().cpu()


class Sight:
    """Collects statistics in blocks of frames, and tracks their variance within a condition.

    Attributes:
        seen: Number of frames so far.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._block = torch.empty(0, 0, dtype=torch.float64)  # statistics of frames since the last block
        self._spread = torch.empty(0, dtype=torch.float64)  # variance (D,) between frames of one condition

    def take(self, pixels: Tensor) -> Tensor | None:
        """Add frames (B, 3, H, W); return the statistics (n, D) of a block once it is full."""
        new = statistics(pixels)
        self._block = torch.cat([self._block, new]) if len(self._block) else new
        self.seen += len(new)
        if len(self._block) < _BLOCK:
            return None
        block, self._block = self._block, self._block[:0]
        return block

    def distance(self, key: Tensor, block: Tensor) -> float:
        """Return the squared distance of a block from a condition's mean (D,), in units of the variance within a
        condition.
        """
        off = (block.mean(0) - key).square() / self._spread.clamp(min=_LEAST_SPREAD)
        return float(off.mean())

    def near(self, key: Tensor, block: Tensor) -> bool:
        """Return whether a block (n, D) may belong to the condition with this mean (D,)."""
        return self.distance(key, block) <= _NEAR + _CHANCE / len(block)

    def note(self, key: Tensor, block: Tensor) -> None:
        """Update the variance with a block of the condition with this mean."""
        spread = (block - key).square().mean(0)
        share = min(1.0, len(block) / min(self.seen, _STEADY))
        self._spread = self._spread.lerp(spread, share) if len(self._spread) else spread

    def state(self) -> dict[str, Tensor]:
        """Return everything that later decisions depend on."""
        return {"block": self._block, "spread": self._spread, "seen": torch.tensor(self.seen)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._block, self._spread, self.seen = state["block"].clone(), state["spread"].clone(), int(state["seen"])
