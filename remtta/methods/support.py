"""Find out which methods support which models, by asking the backbones and the methods."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from torch import nn

from remtta.backbones.backbone import Scores
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.errors import RemttaError, logging_at
from remtta.methods.build import build_method
from remtta.methods.table import METHOD_SUMMARIES

_log = logging.getLogger("remtta")

_CLASSES = 1000  # classes of the head added to a model without one


@dataclass(frozen=True)
class Support:
    """The methods and masks that remtta supports on a timm model."""

    model: str  # its name
    kind: str  # in a few words
    has_head: bool  # whether timm's model has a classifier; if not, the user's weights must include one
    masks: tuple[str, ...] = ()  # scores by which REM can mask, its default first, besides random ones
    blocks: int = 0  # number of blocks or stages
    adapted: tuple[int, ...] = ()  # those whose norms the default method adapts
    num_adapted: int = 0  # number of weights in these norms
    refused: dict[str, str] = field(default_factory=dict)  # unsupported methods, and why

    @property
    def adapts(self) -> str:
        """The blocks whose norms the default method adapts, e.g. "blocks 0-8 of 12"."""
        first = [number for number in self.adapted if number - 1 not in self.adapted]
        last = [number for number in self.adapted if number + 1 not in self.adapted]
        runs = (f"{start}-{end}" if start < end else str(start) for start, end in zip(first, last, strict=True))
        return f"blocks {','.join(runs)} of {self.blocks}" if self.adapted else "nothing"

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(name for name in METHOD_SUMMARIES if name not in self.refused)


def kinds() -> dict[str, str]:
    """Return a timm model of each kind in all families, and a short description of the kind."""
    from remtta.backbones.families import FAMILIES

    return {model: kind for family in FAMILIES.values() for kind, model in getattr(family, "kinds", {}).items()}


def support_of(model: str, kind: str | None = None) -> Support:
    """Return what remtta supports on a timm model, without allocating its weights if it is of a family."""
    from remtta.backbones.families import FAMILIES

    module, has_head = _built(model, "meta")
    if not isinstance(module, tuple(FAMILIES)):  # only values show which patches can be masked
        module, has_head = _built(model, "cpu")
    return support_in(module, model, kind, has_head=has_head, refused=refused_methods(module, METHOD_SUMMARIES))


def _built(model: str, device: str) -> tuple[nn.Module, bool]:
    """Return a timm model with random weights and a head, and whether the head is timm's."""
    import timm

    with torch.device(device):
        module: Any = timm.create_model(model, pretrained=False)
        has_head = bool(module.num_classes)
        if not has_head:
            module.reset_classifier(_CLASSES)
    return module, has_head


def support_in(
    module: nn.Module, model: str, kind: str | None = None, *, has_head: bool = True, refused: dict[str, str]
) -> Support:
    """Return what remtta supports on a model, given the methods refused; its kind is by default its class's name."""
    found = Support(model, kind or type(module).__name__, has_head, refused=refused)
    with logging_at(logging.CRITICAL, _log), contextlib.suppress(RemttaError):
        backbone = backbone_of(module)
        masks = tuple(each for each in get_args(Scores) if not _refusal(backbone.check_scores, each))
        found = replace(found, masks=masks, blocks=len(backbone.blocks))
        adapted = set(adapted_norms(backbone, "all").values())
        places = enumerate(backbone.blocks)
        numbers = tuple(number for number, block in places if not adapted.isdisjoint(block.parameters()))
        found = replace(found, adapted=numbers, num_adapted=sum(parameter.numel() for parameter in adapted))
    return found


def refused_methods(module: nn.Module, methods: Iterable[str]) -> dict[str, str]:
    with logging_at(logging.CRITICAL, _log):  # they are only tried out
        return {name: why for name in methods if (why := _refusal(build_method, name, module))}


def _refusal(ask: Callable[..., object], *about: object) -> str | None:
    try:
        ask(*about)
    except RemttaError as error:
        return str(error)
    return None
