"""Image classifiers in folders that Hugging Face's transformers saved, as the timm models that they equal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from remtta.errors import CheckpointError
from remtta.models.huggingface_images import image_settings
from remtta.models.huggingface_models import FAMILIES, Config, Family, Size, pair

_PREFIX = "local-dir:"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_ONE_CLASS: Config = {"problem_type": (None, "single_label_classification")}
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True)
class TransformersFolder:
    """A folder that transformers saved, and its config.json."""

    path: Path
    config: Config

    @property
    def weights(self) -> Path:
        """The file of its weights.

        Raises:
            CheckpointError: If there is none, or there are several.
        """
        for name in _WEIGHTS:
            if (self.path / name).is_file():
                return self.path / name
        if any((self.path / name).is_file() for name in _SHARDED):
            raise CheckpointError(
                f"the weights in {self.path} are in several files; save them as one: "
                'model.save_pretrained(folder, max_shard_size="100GB")'
            )
        raise CheckpointError(f"{self.path} has no {_WEIGHTS[0]}; save the model again, or give --checkpoint")


def transformers_folder(name: str) -> TransformersFolder | None:
    """Return the folder that a model's name stands for, if transformers saved it; timm's own are left to timm."""
    path = Path(name.removeprefix(_PREFIX))
    if not name.startswith(_PREFIX) or not (path / "config.json").is_file():
        return None
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None  # timm tells
    if not isinstance(config, dict) or "architecture" in config or not {"model_type", "architectures"} & set(config):
        return None
    return TransformersFolder(path, config)


def weights_file(name: str, checkpoint: str | Path | None) -> Path | None:
    """Return the file of a model's weights, the checkpoint or its folder's; None where timm finds them."""
    folder = transformers_folder(name) if checkpoint is None else None
    if folder is not None:
        return folder.weights
    return None if checkpoint is None else Path(checkpoint)


def build_folder(
    folder: TransformersFolder, num_classes: int | None = None, input_size: Size | None = None
) -> nn.Module:
    """Build the timm model that a folder's config.json describes, without its weights.

    Preprocessing and class names are in its `pretrained_cfg`; its `model_type`
    there says whose names its weights may have.

    Raises:
        CheckpointError: If it is no classifier that timm has, with the reason.
    """
    kind, family = _family(folder)
    config = {**family.defaults, **folder.config}
    place = folder.path / "config.json"
    try:
        _check(place, config, family)
        names = _class_names(place, config)
        settings = image_settings(folder.path, kind, pair(config["image_size"]))
        size = input_size or _own_size(folder, config, family, settings["input_size"][1:])
        if kind == "swin":
            _check_windows(folder, config, size)
        model: Any = family.build(config, size, num_classes or len(names))
    except (TypeError, ValueError, LookupError, ArithmeticError, AssertionError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        raise CheckpointError(f"{place} describes no model that can be built ({reason})") from error
    placeholders = [f"LABEL_{number}" for number in range(len(names))]
    model.pretrained_cfg = model.default_cfg = {
        **settings,
        "input_size": (3, *size),
        "num_classes": len(names),
        "label_names": None if names == placeholders else names,
        "model_type": kind,
    }
    built: nn.Module = model
    return built


def _family(folder: TransformersFolder) -> tuple[str, Family]:
    kind = folder.config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(
            f"{folder.path} holds a model of type {kind!r}; of transformers' models remtta reads "
            f"{', '.join(FAMILIES)}; convert it to timm's names, for --checkpoint"
        )
    return kind, FAMILIES[kind]


def _check(place: Path, config: Config, family: Family) -> None:
    """Raise CheckpointError, naming what is no classifier or what timm's model cannot be told."""
    saved = config.get("architectures") or family.classifiers[:1]
    if saved[0] not in family.classifiers:
        raise CheckpointError(f"{place} says {saved[0]}; remtta reads {' and '.join(family.classifiers)}")
    for option, values in {**family.only, **_ONE_CLASS}.items():
        if config.get(option, values[0]) not in values:
            raise CheckpointError(
                f"{place} says {option}={config[option]!r}; timm's model knows {values[0]!r} only, so it is not read"
            )


def _class_names(place: Path, config: Config) -> list[str]:
    """One per class; transformers saves none where there are two."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        return [str(names[str(number)]) for number in range(len(names))]
    except (LookupError, TypeError) as error:
        raise CheckpointError(f"{place} has an id2label that does not count from 0: {str(names)[:80]}") from error


def _own_size(folder: TransformersFolder, config: Config, family: Family, prepared: Size) -> Size:
    """Height and width of the images that the folder's own preprocessing makes."""
    own = pair(config["image_size"])
    if family.fixed_size and own != prepared:
        raise CheckpointError(
            f"{folder.path}: preprocessor_config.json makes images of {prepared[0]} x {prepared[1]} pixels, and "
            f"config.json has a model for {own[0]} x {own[1]}; choose with --input-size"
        )
    return prepared


def _check_windows(folder: TransformersFolder, config: Config, size: Size) -> None:
    """Refuse images that have to be padded, which transformers does before it shifts windows, and timm afterwards."""
    stages, window, patch = len(config["depths"]), config["window_size"], pair(config["patch_size"])
    for stage in range(stages):
        rows, columns = (pixels / (side * 2**stage) for pixels, side in zip(size, patch, strict=True))
        tiled = rows % window == columns % window == 0
        if not tiled or min(rows, columns) == window != max(rows, columns):
            units = [side * 2 ** (stages - 1) * window for side in patch]
            raise CheckpointError(
                f"{folder.path}: images of {size[0]} x {size[1]} pixels do not divide into this Swin's windows; "
                f"choose an --input-size that is a multiple of {units[0]} x {units[1]}"
            )
