"""Export the adapted model as a folder that timm and remtta load by `local-dir:FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from timm.models._hub import save_config_for_hf  # its public save_for_hf refuses weights that layers share

from remtta.deltas.delta import save_weights
from remtta.errors import RemttaError, UsageError
from remtta.export.adapted import ExportableModel
from remtta.models.card import card_of
from remtta.models.loading import load_model
from remtta.models.unwrapping import config_of
from remtta.models.zero_shot import ZeroShotHead


def write_timm(adapted: ExportableModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, and verify them by loading them with timm and remtta. Raise
    UsageError if timm cannot build such a model; RemttaError if the loaded model is not the adapted model.
    """
    model: Any = adapted.model
    own = config_of(model)
    if "architecture" not in own or any(isinstance(module, ZeroShotHead) for module in model.modules()):
        raise UsageError(
            "--format timm takes neither zero-shot models nor folders saved by transformers; use --format onnx, or "
            "remtta apply"
        )
    model.pretrained_cfg = {name: value for name, value in own.items() if name not in ("built_from", "label_names")}
    try:
        labels = {"label_names": list(adapted.card.labels)} if adapted.card.labels else {}
        facts = {name: value for name, value in adapted.facts.items() if name not in ("labels", "preprocessing")}
        save_config_for_hf(model, str(folder / "config.json"), model_config={**labels, "remtta": facts})
        save_weights(folder / "model.safetensors", model)
    finally:
        model.pretrained_cfg = own
    name = f"local-dir:{folder}"
    try:
        again = timm.create_model(name, pretrained=True).eval()
        card = card_of(load_model(name))
    except Exception as error:  # timm raises many types
        raise RemttaError(
            f"timm cannot load its own export of {adapted.delta.model}: {error}; try --format onnx"
        ) from error
    was = adapted.card
    if (card.sha256, card.preprocessing, card.labels) != (was.sha256, was.preprocessing, was.labels):
        raise RemttaError(f"timm loads its own export of {adapted.delta.model} as a different model; use --format onnx")
    adapted.check("timm", again)
