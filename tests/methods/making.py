"""Build methods on a model from their objectives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from remtta.methods.method import Updater
from remtta.methods.objective import Objective
from remtta.methods.settings import MethodConfig
from tests.conftest import tiny_vit

Kind = TypeVar("Kind", bound=Objective[Any])


def made(objective: type[Kind], model: nn.Module, config: MethodConfig | None = None) -> Updater[Kind]:
    """Return the method of an objective on a model, by default with its default settings."""
    return Updater(model, config or objective.settings(), objective)


def vivid_vit(scale: float) -> Any:
    """Return the tiny ViT with predictions from nearly certain to nearly uniform."""
    model: Any = tiny_vit(depth=4)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    return model
