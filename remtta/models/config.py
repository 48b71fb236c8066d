"""What travels with a timm model in its `pretrained_cfg`: preprocessing, labels, and what it was built from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

UNKNOWN = "unknown"  # name of a model that `load_model` did not build


def origin_of(model: nn.Module) -> dict[str, Any]:
    """Return what `load_model` built a model from, for records and deltas; the name "unknown" for any other model."""
    return dict(config_of(model).get("built_from") or {"name": UNKNOWN})


def config_of(model: Any) -> dict[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def built_from(
    name: str,
    checkpoint: str | Path | None,
    use_ema: bool = False,
    num_classes: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    input_size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Arguments of `load_model` that build the same model from anywhere: the checkpoint's path is absolute."""
    return {
        "name": name,
        "checkpoint": None if checkpoint is None else str(Path(checkpoint).resolve()),
        "use_ema": use_ema,
        "num_classes": num_classes,
        "model_kwargs": dict(model_kwargs or {}),
        "input_size": input_size,
    }
