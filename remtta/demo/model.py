"""The demo's embedded ViT: 48 x 48 pixels, 64 patch tokens, trained by examples/train_demo_model.py."""

from __future__ import annotations

from importlib import resources
from typing import Any

from torch import nn

from remtta.demo.signs import CLASS_NAMES
from remtta.models import load_model

MODEL_NAME = "vit_tiny_patch16_224"
MODEL_KWARGS: dict[str, Any] = {"img_size": 48, "patch_size": 6, "embed_dim": 128, "depth": 8, "num_heads": 4}


def load_demo_model(**given: Any) -> nn.Module:
    """The embedded classifier of road signs, with its weights, labels and preprocessing.

    Args:
        given: Arguments of `load_model` that replace its own, unless None.
    """
    with resources.as_file(resources.files("remtta.demo") / "model.safetensors") as checkpoint:
        own = {
            "checkpoint": checkpoint,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "crop_pct": 1.0,
            "labels": CLASS_NAMES,
        }
        chosen = {**own, **{name: value for name, value in given.items() if value is not None}}
        return load_model(MODEL_NAME, num_classes=len(CLASS_NAMES), model_kwargs=MODEL_KWARGS, **chosen)
