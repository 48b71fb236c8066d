"""The demo's embedded ViT: 48 x 48 pixels, 64 patch tokens, trained by examples/train_demo_model.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import resources
from typing import Any

EMBEDDED = "remtta-demo"
"""Its model name."""

MODEL_NAME = "vit_tiny_patch16_224"
MODEL_KWARGS: dict[str, Any] = {"img_size": 48, "patch_size": 6, "embed_dim": 128, "depth": 8, "num_heads": 4}
CLASS_NAMES: tuple[str, ...] = (
    "speed limit 20",
    "speed limit 30",
    "speed limit 50",
    "speed limit 70",
    "speed limit 80",
    "speed limit 100",
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
"""Road signs by class number; drawn by `remtta.demo.signs`."""


@contextlib.contextmanager
def embedded_arguments() -> Iterator[dict[str, Any]]:
    """Yield the arguments of `load_model` that build it; its weights file exists while the block runs."""
    with resources.as_file(resources.files("remtta.models") / "embedded.safetensors") as checkpoint:
        yield {
            "name": MODEL_NAME,
            "checkpoint": checkpoint,
            "num_classes": len(CLASS_NAMES),
            "model_kwargs": MODEL_KWARGS,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "crop_pct": 1.0,
            "labels": CLASS_NAMES,
        }
