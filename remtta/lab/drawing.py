"""Colours, settings and running errors of all plots with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

COLOURS = {
    "source": "#969696",
    "tent": "#d98c1f",
    "pseudo-label": "#8c6bb1",
    "remtta": "#1a1a1a",
    "rem": "#195fbe",
    "rem-n1": "#41a6d9",
    "supervised": "#14783c",
}
"""Colours of methods, the same in every plot."""

STYLE: Any = {  # matplotlib types its keys as literals
    **dict.fromkeys(("text.usetex", "text.parse_math"), False),  # names are shown as they are, not as formulas
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
}
"""Settings of matplotlib for every plot, whatever a user's matplotlibrc says."""


def running_error(missed: Sequence[int], window: int) -> np.ndarray:
    """Return the error in percent of the `window` images around each image; at both ends, of those that exist.

    `missed` says of each image whether it was misclassified, in order.
    """
    total, positions = np.cumsum([0, *missed]), np.arange(len(missed))
    starts, stops = np.maximum(0, positions - window // 2), np.minimum(len(missed), positions + (window + 1) // 2)
    return 100 * (total[stops] - total[starts]) / (stops - starts)
