"""The demo's ViT, which comes with remtta: 48 x 48 pixels, 64 patch tokens; see examples/train_demo_model.py."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from remtta.models.timm_loader import IMPORTS
from remtta.options.loaders import Loader, OnTexts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from remtta.options import ModelOptions

DEMO_MODEL = "remtta-demo"
"""Its name."""

ARCHITECTURE = "vit_tiny_patch16_224"
MODEL_KWARGS: dict[str, int] = {"img_size": 48, "patch_size": 6, "embed_dim": 128, "depth": 8, "num_heads": 4}
CLASS_NAMES: tuple[str, ...] = (
    *(f"speed limit {limit}" for limit in (20, 30, 50, 70, 80, 100)),
    "end of limits",
    "stop",
    "give way",
    "priority road",
    "no entry",
    "no vehicles",
    "no parking",
    "no stopping",
    "turn left",
    "turn right",
    "straight ahead",
    "roundabout",
    "danger",
    "crossroads",
    "bend left",
    "bend right",
)
"""Road signs by class number; drawn by `remtta.lab.demo.signs`."""

_HALF = (0.5, 0.5, 0.5)
_OWN: dict[str, Any] = {"label_names": CLASS_NAMES, "mean": _HALF, "std": _HALF, "crop_pct": 1.0}


class DemoLoader(Loader):
    """The demo's model, whose weights, labels and preprocessing the user may replace."""

    names = DEMO_MODEL
    takes = ("checkpoint",)
    imports = IMPORTS
    is_bundled = True

    def matches(self, options: ModelOptions) -> bool:
        return options.name == DEMO_MODEL

    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from importlib import resources  # takes a while

        from remtta.models.timm_loading import load_timm

        fixed: dict[str, Any] = {"name": ARCHITECTURE, "num_classes": len(CLASS_NAMES), "model_kwargs": MODEL_KWARGS}
        with resources.as_file(resources.files("remtta.lab.demo") / "demo_model.safetensors") as weights:
            built = replace(options, **fixed, mean=_HALF, std=_HALF, checkpoint=options.checkpoint or weights)
            model = load_timm(built)
        model.pretrained_cfg |= {**_OWN, "built_from": {}}
        return model
