"""New deltas of old ones: the average of a fleet's, and a share of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remtta.deltas.delta import Delta
from remtta.errors import DeltaError, UsageError, check_finite


def average(deltas: Sequence[Delta]) -> Delta:
    """The mean of deltas of one model, each weighted by the frames behind it.

    A tensor that a delta does not have counts as unchanged. Sums run in double precision.

    Raises:
        UsageError: If there are fewer than two.
        DeltaError: If they were made on other weights or preprocessing, have a tensor in two shapes, or no frames.
    """
    if len(deltas) < 2:
        raise UsageError("an average takes two deltas or more")
    for delta in deltas[1:]:
        check_same_base(deltas[0], delta)
    frames = sum(delta.frames for delta in deltas)
    if not all(delta.frames >= 0 for delta in deltas) or not frames:
        raise DeltaError("no frames are behind these deltas, so there is nothing to weight them by")
    weights = [delta.frames / frames for delta in deltas]
    sums: dict[str, Tensor] = {}
    for delta, weight in zip(deltas, weights, strict=True):
        for name, tensor in delta.tensors.items():
            part = weight * tensor.double()
            if name in sums and sums[name].shape != part.shape:
                raise DeltaError(f"{delta.path} has {name} in another shape than the deltas before it")
            sums[name] = sums[name] + part if name in sums else part
    parents = [delta.as_parent(weight=round(weight, 9)) for delta, weight in zip(deltas, weights, strict=True)]
    return _made_of(deltas, sums, frames=frames, lineage={"made_by": "average", "parents": parents})


def scaled(delta: Delta, factor: float) -> Delta:
    """A share of a delta: 0.5 is half the way from the source to the adapted weights, 1 all of it.

    Raises:
        UsageError: If the factor is not above 0.
    """
    check_finite(factor, "the factor", "> 0")
    tensors = {name: factor * tensor.double() for name, tensor in delta.tensors.items()}
    lineage = {"made_by": "scale", "factor": factor, "parents": [delta.as_parent()]}
    return _made_of([delta], tensors, frames=delta.frames, lineage=lineage)


def check_same_base(first: Delta, other: Delta) -> None:
    """Refuse two deltas that are not of one model and one preprocessing.

    Raises:
        DeltaError: Naming what differs.
    """
    if first.base_sha256 != other.base_sha256:
        raise DeltaError(
            f"{other.path} was made on other weights (base {other.base_sha256[:12]}...) than {first.path} "
            f"({first.base_sha256[:12]}...); only deltas of one checkpoint go together"
        )
    if first.preprocessing != other.preprocessing:
        raise DeltaError(
            f"{other.path} was made with another preprocessing than {first.path}; remtta inspect shows both"
        )


def _made_of(deltas: Sequence[Delta], tensors: dict[str, Tensor], *, frames: int, lineage: dict[str, Any]) -> Delta:
    """A delta in float32, which has of the settings those that all of them share."""
    first = deltas[0]
    shared = {
        name: value
        for name, value in first.hyperparameters.items()
        if all(name in each.hyperparameters and each.hyperparameters[name] == value for each in deltas)
    }
    return Delta(
        tensors={name: tensor.to(torch.float32) for name, tensor in tensors.items()},
        model=first.model,
        base_sha256=first.base_sha256,
        method="+".join(dict.fromkeys(delta.method for delta in deltas)),
        hyperparameters=shared,
        frames=frames,
        updates=sum(delta.updates for delta in deltas),
        model_options=first.model_options,
        preprocessing=first.preprocessing,
        lineage=lineage,
    )
