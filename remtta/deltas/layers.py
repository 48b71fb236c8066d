"""How far the layers of a delta moved, and how far two deltas are from each other; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from remtta.errors import DeltaError

_MOST_CLASSES = 5
_LONGEST_NUMBER = 10  # digits; no model has so many blocks


def layers_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Of each layer, in the model's order: root of the mean square of its change, and its largest."""
    return [{"layer": name, "rms": _rms(change), "max": _most(change)} for name, change in _layers(arrays).items()]


def classes_moved(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Of a head that was centred, whose bias alone moved: the classes that it says most more or less often, by number.

    A norm moves with its weight, and the head of a method that trains it all.
    """
    alone = [name for name in arrays if name.endswith("bias") and name.removesuffix("bias") + "weight" not in arrays]
    if not alone:
        return []
    change = np.mean([arrays[name].reshape(-1).astype(np.float64) for name in alone], axis=0)
    most = np.argsort(-np.abs(change), kind="stable")[:_MOST_CLASSES]
    return [{"class": int(number), "bias": float(change[number])} for number in most if change[number]]


def layers_apart(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """How two deltas of one model differ, in all ("layer" is None) and in each layer.

    A tensor that only one of them has is one that the other leaves as it is.

    Returns:
        For each: "rms" of both changes, "distance", the rms of their difference, and "cosine" of the angle between
        them, None where one of them moves nothing.

    Raises:
        DeltaError: If they have a tensor in two shapes.
    """
    for name in first.keys() & second.keys():
        if first[name].shape != second[name].shape:
            raise DeltaError(f"the deltas have {name} in two shapes, {first[name].shape} and {second[name].shape}")
    both = [
        _layers({**{name: np.zeros_like(array) for name, array in other.items()}, **arrays})
        for arrays, other in ((first, second), (second, first))
    ]
    whole = [np.concatenate([np.zeros(0), *layers.values()]) for layers in both]
    pairs: dict[str | None, list[np.ndarray]] = {None: whole}
    pairs.update({name: [layers[name] for layers in both] for name in both[0]})
    return [
        {"layer": name, "rms": [_rms(one), _rms(other)], "distance": _rms(one - other), "cosine": _cosine(one, other)}
        for name, (one, other) in pairs.items()
    ]


def _layers(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All values of each layer in one row, in double precision."""
    parts: dict[str, list[np.ndarray]] = {}
    for name in sorted(arrays, key=_natural):
        parts.setdefault(name.rpartition(".")[0], []).append(arrays[name].reshape(-1).astype(np.float64))
    return {name: np.concatenate(values) for name, values in parts.items()}


def _most(change: np.ndarray) -> float:
    return float(np.abs(change).max(initial=0.0))


def _rms(change: np.ndarray) -> float:
    most = _most(change)
    return most * float(np.sqrt(np.square(change / most).mean())) if most else 0.0  # the squares may be too large


def _cosine(first: np.ndarray, second: np.ndarray) -> float | None:
    sizes = _most(first), _most(second)
    if not all(sizes):
        return None
    one, other = first / sizes[0], second / sizes[1]
    return float(one @ other / np.sqrt((one @ one) * (other @ other)))


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() and len(part) < _LONGEST_NUMBER else (-1, part) for part in name.split(".")
    ]
