"""The loader of timm's models, which takes every name that no other loader does. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remtta.options.loaders import OPTIONAL, Loader, OnTexts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from remtta.options import ModelOptions

IMPORTS = ("remtta.backbones.families", "remtta.models.timm_loading")
"""Modules that import timm, which takes seconds."""


class TimmLoader(Loader):
    """timm's models by name, in its folders, and on the hub."""

    names = "A timm model, hf-hub:OWNER/NAME, local-dir:FOLDER"
    takes = OPTIONAL
    imports = IMPORTS

    def matches(self, options: ModelOptions) -> bool:
        return True

    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from remtta.models.timm_loading import load_timm

        return load_timm(options)
