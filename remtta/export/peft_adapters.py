"""Export a delta as a LayerNorm-tuning adapter for PEFT."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import torch
from torch import nn

from remtta.backbones.norms import norm_modules
from remtta.errors import UsageError, needed
from remtta.export.adapted import ExportableModel
from remtta.models.unwrapping import classifiers_of


def write_peft(adapted: ExportableModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, for `PeftModel.from_pretrained(base, folder)`. Raise
    UsageError if PEFT is missing, or the delta changes something that LayerNorm tuning cannot represent; RemttaError if
    PEFT's logits differ from the adapted model's.
    """
    peft = needed("peft", "export", "an export")
    layers = sorted({name.rpartition(".")[0] for name in adapted.delta.tensors})
    tunable = {
        name
        for name, module in norm_modules(adapted.model).items()
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    heads = tuple(f"{place}." for place in classifiers_of(adapted.model))  # of centred logits; whole layers are stored
    if others := [name for name in layers if name not in tunable and not f"{name}.".startswith(heads)]:
        raise UsageError(
            f"the delta changes {others[0] or 'weights'} ({len(others)} layers in all), and LayerNorm tuning keeps "
            "neither running statistics nor other weights than the norms' and the head's; use --format timm or onnx"
        )
    base = copy.deepcopy(adapted.model)
    base.load_state_dict(dict(adapted.base))
    config = peft.LNTuningConfig(target_modules=f"({'|'.join(map(re.escape, layers))})", inference_mode=True)
    tuned = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if name in adapted.delta.tensors:
                layer, _, part = name.rpartition(".")
                tuned.get_submodule(f"base_model.model.{layer}.ln_tuning_layers.default").get_parameter(part).copy_(
                    parameter
                )
    tuned.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in
    again = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    adapted.check("PEFT", again)
