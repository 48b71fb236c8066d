"""A classifier with some of its classes only, as the protocols of ImageNet-R and ImageNet-A ask for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from remtta.errors import ModelError
from remtta.models.labels import labels_of
from remtta.models.zero_shot import ZeroShotHead


def restrict_classes(model: Any, numbers: Sequence[int]) -> None:
    """Cut a classifier's heads down to some of its classes, in place.

    Losses and thresholds of every method then see only these classes, as the
    protocols of ImageNet-R and ImageNet-A ask for.

    Args:
        model: A timm transformer.
        numbers: The classes to keep, in their new order.

    Raises:
        ModelError: If a head is not a linear layer.
    """
    rows = torch.tensor(list(numbers))
    labels = labels_of(model)
    zero_shot = _zero_shot_heads(model)
    for name, each in zero_shot.items():
        model.set_submodule(name, each.restricted(numbers))
    for name in () if zero_shot else ("head", "head_dist"):
        head = getattr(model, name, None)
        if head is None:
            continue
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the model's {name} is no linear layer, so its classes cannot be restricted")
        kept = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device=head.weight.device)
        with torch.no_grad():
            kept.weight.copy_(head.weight[rows])
            if head.bias is not None:
                kept.bias.copy_(head.bias[rows])
        setattr(model, name, kept)
    model.num_classes = len(rows)
    names = None if labels is None else [labels[number] for number in numbers]
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(rows), "label_names": names}


@contextlib.contextmanager
def restricted_classes(model: Any, numbers: Sequence[int] | None) -> Iterator[None]:
    """Have `restrict_classes` done within the block, if there are numbers; afterwards the heads are the same as before.

    Raises:
        ModelError: If a head is not a linear layer.
    """
    names = ("head", "head_dist", "num_classes", "pretrained_cfg")
    whole, zero_shot = {name: getattr(model, name) for name in names if hasattr(model, name)}, _zero_shot_heads(model)
    try:
        if numbers is not None:
            restrict_classes(model, numbers)
        yield
    finally:
        for name, value in whole.items():
            setattr(model, name, value)
        for name, head in zero_shot.items():
            model.set_submodule(name, head)


def _zero_shot_heads(model: nn.Module) -> dict[str, ZeroShotHead]:
    """Heads made of texts, by their places in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ZeroShotHead)}
