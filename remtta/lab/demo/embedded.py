"""The demo's embedded ViT: 48 x 48 pixels, 64 patch tokens, trained by examples/train_demo_model.py."""

from __future__ import annotations

EMBEDDED = "remtta-demo"
"""Its model name."""

MODEL_NAME = "vit_tiny_patch16_224"
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
