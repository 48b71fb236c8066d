"""The shape and preprocessing of the demo's embedded ViT."""

from __future__ import annotations

from typing import Any

MODEL_NAME = "vit_tiny_patch16_224"
MODEL_KWARGS: dict[str, Any] = {"img_size": 48, "patch_size": 6, "embed_dim": 128, "depth": 8, "num_heads": 4}
