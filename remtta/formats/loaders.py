"""The loaders of ONNX files, and of folders that transformers saved. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from remtta.errors import CheckpointError
from remtta.models.timm_loader import IMPORTS
from remtta.options.loaders import Loader, OnTexts
from remtta.options.option import model_option

if TYPE_CHECKING:
    import torch
    from torch import nn

    from remtta.deltas.delta import Delta
    from remtta.options import ModelOptions

_PREFIX = "local-dir:"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@dataclass(frozen=True)
class OnnxOptions:
    """Options of an ONNX file."""

    output_name: Annotated[
        str | None,
        model_option("Output of an ONNX file with the logits.", default="the only one (B, C)", more="onnx.md"),
    ] = None
    provider: Annotated[
        str | None,
        model_option("Execution provider of onnxruntime, such as openvino.", default="by --device", more="onnx.md"),
    ] = None


class OnnxLoader(Loader):
    """ONNX files, of which there are forward passes only."""

    names = "an ONNX file"
    suffixes = (".onnx",)
    options = OnnxOptions
    has_own_devices = True
    packages = (("onnx", "onnx"), ("onnxruntime", "onnx"))
    default_method = "fast"

    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from remtta.formats.onnx_loading import load_onnx

        return load_onnx(options, self.own_options(options), device)

    def load_to_check(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from remtta.formats.onnx_loading import load_onnx

        return load_onnx(options, self.own_options(options), device, to_check=True)

    def write_adapted(self, delta: Delta, options: ModelOptions, output: Path) -> str:
        from remtta.formats.export import adapted_model, save_onnx

        save_onnx(adapted_model(delta, options), output)
        return "with shifted logits, checked by onnxruntime"

    def is_safe(self, option: str, value: object) -> bool:
        return option == "output_name" and isinstance(value, str)


class TransformersLoader(Loader):
    """Folders that transformers saved, as equivalent timm models."""

    names = "local-dir:FOLDER saved by transformers"
    takes = ("checkpoint", "use_ema", "num_classes", "input_size")
    imports = (*IMPORTS, "remtta.formats.transformers_folders")

    def matches(self, options: ModelOptions) -> bool:
        return bool(read_config(options))

    def load(self, options: ModelOptions, device: str | torch.device, on_texts: OnTexts | None) -> nn.Module:
        from remtta.formats.transformers_folders import load_folder

        return load_folder(options)

    def weights_file(self, options: ModelOptions) -> Path | str | None:
        return options.checkpoint or find_weights(folder_of(options))


def folder_of(options: ModelOptions) -> Path:
    """Return the folder that a model's name holds."""
    return Path((options.name or "").removeprefix(_PREFIX))


def read_config(options: ModelOptions) -> Mapping[str, Any]:
    """Return the config.json of a model's folder if transformers saved it; else nothing, as timm reads its own."""
    return config_in(folder_of(options)) if (options.name or "").startswith(_PREFIX) else {}


def config_in(folder: Path) -> Mapping[str, Any]:
    """Return the config.json in a folder if transformers saved it, else nothing."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # reported by timm
    saved = isinstance(config, dict) and "architecture" not in config and {"model_type", "architectures"} & set(config)
    return config if saved else {}


def find_weights(folder: Path) -> Path:
    """Return the file of the weights in a folder; raise CheckpointError if there is none, or several."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    if any((folder / f"{name}.index.json").is_file() for name in _WEIGHTS):
        raise CheckpointError(
            f"the weights in {folder} are in several files; save them as one: "
            'model.save_pretrained(folder, max_shard_size="100GB")'
        )
    raise CheckpointError(f"{folder} has no {_WEIGHTS[0]}; save the model again, or give --checkpoint")
