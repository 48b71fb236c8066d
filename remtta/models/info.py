"""Metadata of a timm model in its `pretrained_cfg`, and a summary of a model."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.errors import ModelError, UsageError, counted
from remtta.files import read_text
from remtta.models import imagenet
from remtta.models.metadata import ModelWithMetadata, PretrainedConfig
from remtta.models.preprocessing import Preprocessing, guessed_options, preprocessing_of
from remtta.models.tensor_files import state_sha256
from remtta.models.unwrapping import config_of, num_classes_of, unwrap_model
from remtta.options import ModelOptions
from remtta.options.loaders import own_options
from remtta.options.option import option_fields

_log = logging.getLogger(__name__)

UNKNOWN = "unknown"  # name of a model not built by `load_model`

_SOURCE_SHA256 = "_remtta_source_sha256"
"""Attribute of an adapted module with the digest of its source weights, which copies and files of the module keep."""

LoadArguments = dict[str, Any]
"""Arguments of `load_model`, ready for JSON."""


@dataclass(frozen=True)
class ModelInfo:
    """A summary of a run's model."""

    origin: LoadArguments  # with which `load_model` built it; the name "unknown" for any other model
    sha256: str  # of its whole state, the source weights
    preprocessing: Preprocessing
    labels: Sequence[str] | None
    num_classes: int
    device: torch.device
    provider: str | None = None  # execution provider of an ONNX file
    guessed: str = ""  # options of its preprocessing, with ImageNet's values, as it has none of its own

    @property
    def name(self) -> str:
        """Its name in records and deltas."""
        return str(self.origin["name"])

    @property
    def options(self) -> LoadArguments:
        """Arguments of `load_model` other than its name."""
        return {key: value for key, value in self.origin.items() if key != "name"}


def model_info(model: nn.Module, preprocessing: Preprocessing | None = None, sha256: str | None = None) -> ModelInfo:
    """Return a summary of a classifier at its source weights; pass the whole model's hash if its head is restricted.

    Raise ModelError if it has no weights; UsageError if its labels are not as many as its classes.
    """
    config, module, num_classes = config_of(model), unwrap_model(model).module, num_classes_of(model)
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta:
        problem = "no weights" if weight is None else "no values in its weights, which are on the meta device"
        raise ModelError(f"{type(module).__name__} has {problem}")
    if not all(isinstance(value, Tensor) for value in module.state_dict().values()):
        raise ModelError(f"{type(module).__name__} has quantised weights or other packed state; give a float32 model")
    if isinstance(model, ModelWithMetadata) and model.labels is not None:
        checked_labels(model.labels, num_classes)
    return ModelInfo(
        origin=dict(config.get("built_from") or {"name": UNKNOWN}),
        sha256=sha256 or state_sha256(module),
        preprocessing=preprocessing or preprocessing_of(model),
        labels=known_labels(num_classes, config),
        num_classes=num_classes,
        device=weight.device,
        provider=getattr(module, "provider", None),
        guessed="" if preprocessing else guessed_options(model),
    )


def warn_of_change(model: nn.Module, info: ModelInfo) -> None:
    """Warn if a model's weights are not those that it was first adapted from."""
    if vars(unwrap_model(model).module).setdefault(_SOURCE_SHA256, info.sha256) != info.sha256:
        _log.warning(
            "the model's weights have changed since it was first adapted, maybe before it was copied, and now count as "
            "the source weights; build the model anew to start from the first ones"
        )


def built_from(options: ModelOptions) -> LoadArguments:
    """Return arguments of `load_model` that build the same model from any folder."""
    kinds = {each.name: each.type for each in option_fields(own_options())}
    own = {name: str(Path(value).resolve()) if kinds[name] is Path else value for name, value in options.own.items()}
    return {
        **own,
        "name": options.name,
        "checkpoint": None if options.checkpoint is None else str(Path(options.checkpoint).resolve()),
        "use_ema": options.use_ema,
        "num_classes": options.num_classes,
        "model_kwargs": dict(options.model_kwargs),
        "input_size": options.input_size,
    }


def given_preprocessing(options: ModelOptions) -> PretrainedConfig:
    """Return the preprocessing options that are set, in the form of timm's configs."""
    size = None if options.input_size is None else (3, *options.input_size)
    values = {name: getattr(options, name) for name in ("mean", "std", "interpolation", "crop_pct")}
    return {name: value for name, value in {**values, "input_size": size}.items() if value is not None}


def labels_of(model: nn.Module) -> list[str] | None:
    """Return the class names of a model: its own, ImageNet's for 1,000 classes, or None."""
    return known_labels(num_classes_of(model), config_of(model))


def set_labels(model: nn.Module, labels: Sequence[str]) -> None:
    """Set the class names of a timm model; raise UsageError if their number is not that of the classes."""
    names = checked_labels(labels, num_classes_of(model))
    config = {**(getattr(model, "pretrained_cfg", None) or {}), "label_names": names}
    model.pretrained_cfg = config  # type: ignore[assignment]  # modules only declare tensors and modules


def read_labels(labels: Sequence[str] | Mapping[int, str] | str | Path | None) -> Sequence[str] | None:
    """Return class names, given by number or as a file: one per line, or `0 airplane` lines, or JSON, which may be a
    model's `id2label`; raise UsageError if a file has none.
    """
    if isinstance(labels, Mapping) and {str(number) for number in labels} != set(map(str, range(len(labels)))):
        raise UsageError(
            f"labels by number need the numbers 0 to {len(labels) - 1}, got {', '.join(map(str, labels))[:80]}"
        )
    if labels is None:
        return None
    if not isinstance(labels, (str, Path)):
        if not isinstance(labels, Iterable) or isinstance(labels, bytes):
            raise UsageError(f"labels are class names, or a file with one per line, got {labels!r:.80}")
        return _labels_in({"label_names": labels})
    if not (text := read_text(labels, "--labels")).strip():
        raise UsageError(f"--labels: {labels} is empty")
    if Path(labels).suffix == ".json":
        return _json_labels(text, labels)
    lines = [line.removesuffix("\r") for line in text.rstrip().split("\n")]
    numbered = [re.fullmatch(r"(\d+)[\s,:]+(.+)", line) for line in lines]
    if len(lines) > 1 and all(pair and int(pair[1]) == number for number, pair in enumerate(numbered)):
        return [pair[2] for pair in numbered if pair]
    return lines


def _json_labels(text: str, path: str | Path) -> Sequence[str] | None:
    try:
        content = json.loads(text)
        return read_labels(content if isinstance(content, list) else dict(content.get("id2label", content)))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f'--labels: {path} is neither a list of names nor {{"0": "name"}} ({error})') from error


def checked_labels(labels: Sequence[str], num_classes: int) -> list[str]:
    if len(labels) != num_classes:
        got = f"got {counted(len(labels), 'label')} for a model with {num_classes} classes"
        raise UsageError(f"{got}; give one for each, in their order, or leave --labels out")
    return list(labels)


def known_labels(num_classes: int, config: PretrainedConfig) -> list[str] | None:
    labels = _labels_in(config)
    if labels and len(labels) == num_classes:
        return labels
    return imagenet.names_of(num_classes) or None


def _labels_in(config: PretrainedConfig) -> list[str]:
    names = config.get("label_names") or ()
    if isinstance(names, Mapping):  # timm also accepts class number -> name; in JSON, the numbers are strings
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number[str(number)] for number in range(len(by_number)) if str(number) in by_number]
    return [str(name) for name in names]
