"""The function of each corruption."""

from __future__ import annotations

from collections.abc import Callable

from remtta.corruptions import blur, digital, noise, weather
from remtta.corruptions.filters import Array
from remtta.corruptions.parameters import CORRUPTIONS

FUNCTIONS: dict[str, Callable[..., Array]] = {
    name: getattr(next(module for module in (noise, blur, weather, digital) if hasattr(module, name)), name)
    for name in CORRUPTIONS
}
"""Corruption name to a function (image, rng, scale, **parameters) that returns the corrupted image; see `noise`."""
