"""Small random models of open_clip, in the folders that it writes."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import open_clip
import torch
from safetensors.torch import save_file

from tests.conftest import copied

NAMES = ["cat", "dog", "green frog", "ship", "truck"]
VISION: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 4, "head_width": 8}
TEXT: dict[str, Any] = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}

# A tokenizer reads 50,000 words, which takes longer than all else that a test of a tiny model does.
open_clip.factory.SimpleTokenizer = functools.cache(open_clip.factory.SimpleTokenizer)


def tiny_clip(folder: Path, vision: dict[str, Any] | None = None, **changes: Any) -> tuple[str, Any]:
    """A random model in a folder: its name for remtta, and open_clip's own model."""
    config = {"embed_dim": 24, "vision_cfg": vision or VISION, "text_cfg": TEXT, **changes}
    model = _model(json.dumps(config))
    folder.mkdir(parents=True)
    preprocessing = {"mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bilinear", "resize_mode": "squash"}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocessing}))
    save_file(
        {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        folder / "open_clip_model.safetensors",
    )
    return f"clip:{folder}", model


@copied
def _model(config: str) -> Any:
    """A model of such a configuration, as JSON."""
    torch.manual_seed(0)
    values = json.loads(config)
    kind = open_clip.CustomTextCLIP if values.pop("custom_text", False) else open_clip.CLIP
    model: Any = kind(**values)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "weight" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif parameter.ndim == 2 and "visual" in name:
                parameter.normal_(std=0.2)
    return model.eval()


def copy_of(model: Any) -> Any:
    """A copy of a zero-shot model, but for its tokenizer, whose tables of 50,000 words take long."""
    tokenizer = model.head.texts.tower.tokenizer
    return copy.deepcopy(model, {id(tokenizer): tokenizer})
