"""Conditions, such as night or fog, and how a change of them is seen.

A condition is known by plain statistics of its images: how bright, how varied in colour, how rough at four scales. They
cost next to nothing, and do not move with the weights that adapt, as a model's own features would.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

_STEADY = 1000  # frames that means go by
_SCALES = 4
_BLOCK = 20  # frames that are looked at together, at least
_NEAR, _CHANCE = 0.25, 4.0  # squared distance of one condition's frames, and what it may be more by over their number
_LEAST_SPREAD = 0.01  # variance of a statistic between the frames of one condition, be they ever so alike
_DARK = 1e-3


def statistics(pixels: Tensor) -> Tensor:
    """What conditions are told by: statistics (B, D) of images (B, 3, H, W), on the CPU.

    Brightness and, by their logarithms, spread of each colour; and differences of neighbours across and down, at each
    scale.
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
    """Looks at frames in blocks, and knows how much those of one condition vary.

    Attributes:
        seen: Frames so far.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._block = torch.empty(0, 0, dtype=torch.float64)  # statistics of frames since the last look
        self._spread = torch.empty(0, dtype=torch.float64)  # variance (D,) between frames of one condition

    def take(self, pixels: Tensor) -> Tensor | None:
        """The statistics (n, D) of a block of frames, once the next ones (B, 3, H, W) make it full."""
        new = statistics(pixels)
        self._block = torch.cat([self._block, new]) if len(self._block) else new
        self.seen += len(new)
        if len(self._block) < _BLOCK:
            return None
        block, self._block = self._block, self._block[:0]
        return block

    def distance(self, key: Tensor, block: Tensor) -> float:
        """Of a block from a condition's mean (D,), squared, in variances between frames of one condition."""
        off = (block.mean(0) - key).square() / self._spread.clamp(min=_LEAST_SPREAD)
        return float(off.mean())

    def near(self, key: Tensor, block: Tensor) -> bool:
        """Whether a block (n, D) may be of the condition with this mean (D,)."""
        return self.distance(key, block) <= _NEAR + _CHANCE / len(block)

    def note(self, key: Tensor, block: Tensor) -> None:
        """Have the variance of a block around its condition's mean count."""
        spread = (block - key).square().mean(0)
        share = min(1.0, len(block) / min(self.seen, _STEADY))
        self._spread = self._spread.lerp(spread, share) if len(self._spread) else spread

    def state(self) -> dict[str, Tensor]:
        """All of it."""
        return {"block": self._block, "spread": self._spread, "seen": torch.tensor(self.seen)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
        self._block, self._spread, self.seen = state["block"].clone(), state["spread"].clone(), int(state["seen"])
