"""Weights under other names: tables of patterns, and the parts that timm keeps in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Rules = Sequence[tuple[str, str]]
"""Patterns of names, and what replaces what they match; each is tried on what the ones before it made."""


def renamed(state: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """The same tensors under the names that the rules make of theirs.

    Raises:
        ValueError: If two would have the same name.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise ValueError(f"{new} is there more than once, under other names")
        result[new] = tensor
    return result


def joined(state: Mapping[str, Tensor], parts: Sequence[str], whole: str) -> dict[str, Tensor]:
    """The same tensors, with those of sibling layers put one below the other, in the place of the first.

    Args:
        state: Weights by name.
        parts: Names of the layers, in the order of their rows. Where one is missing, all stay as they are.
        whole: Name of the layer that has them all.

    Raises:
        RuntimeError: If they do not fit one another.
    """
    first = re.compile(rf"(.*\.){re.escape(parts[0])}\.(weight|bias)")
    result = dict(state)
    for name in state:
        match = first.fullmatch(name)
        names = [f"{match[1]}{part}.{match[2]}" for part in parts] if match else []
        if match and all(each in state for each in names):
            result[f"{match[1]}{whole}.{match[2]}"] = torch.cat([result.pop(each) for each in names])
    return result
