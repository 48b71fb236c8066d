"""What travels with a timm model in its `pretrained_cfg`: preprocessing, labels, and what it was built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from remtta.options import ModelOptions

UNKNOWN = "unknown"  # name of a model that `load_model` did not build


def origin_of(model: nn.Module) -> dict[str, Any]:
    """Return what `load_model` built a model from, for records and deltas; the name "unknown" for any other model."""
    return dict(config_of(model).get("built_from") or {"name": UNKNOWN})


def config_of(model: Any) -> dict[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def built_from(given: ModelOptions) -> dict[str, Any]:
    """Arguments of `load_model` that build the same model from anywhere, ready for JSON: paths are absolute."""
    texts = given.text_embeddings
    return {
        "name": given.name,
        "checkpoint": None if given.checkpoint is None else str(Path(given.checkpoint).resolve()),
        "use_ema": given.use_ema,
        "num_classes": given.num_classes,
        "model_kwargs": dict(given.model_kwargs),
        "input_size": given.input_size,
        **({} if texts is None else {"text_embeddings": str(Path(texts).resolve())}),
    }
