"""Measure how far a delta's layers moved; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

_MAX_CLASSES = 5
_LONGEST_NUMBER = 10  # digits; longer ones are not block numbers


def layers_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return each layer's root mean square and largest change, in natural order of their names."""
    return [{"layer": name, "rms": _rms(change), "max": _most(change)} for name, change in _layers(arrays).items()]


def classes_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return the classes whose bias changed most, by number, for a head of which only the bias changed (centring).

    Norms, and heads trained as a whole, change their weight too.
    """
    alone = [name for name in arrays if name.endswith(".bias") and name.removesuffix("bias") + "weight" not in arrays]
    if not alone:
        return []
    change = np.mean([arrays[name].reshape(-1).astype(np.float64) for name in alone], axis=0)
    most = np.argsort(-np.abs(change), kind="stable")[:_MAX_CLASSES]
    return [{"class": int(number), "bias": float(change[number])} for number in most if change[number]]


def _layers(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return all values of each layer as one double-precision vector."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays, key=_natural):
        parts.setdefault(name.rpartition(".")[0], []).append(arrays[name].reshape(-1).astype(np.float64))
    return {name: np.concatenate(values) for name, values in parts.items()}


def _most(change: np.ndarray) -> float:
    return float(np.abs(change).max(initial=0.0))


def _rms(change: np.ndarray) -> float:
    most = _most(change)
    return most * float(np.sqrt(np.square(change / most).mean())) if most else 0.0  # squares may overflow


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and len(part) < _LONGEST_NUMBER else (-1, part) for part in name.split(".")
    ]
