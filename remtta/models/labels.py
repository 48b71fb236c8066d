"""What a model's classes are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from remtta.errors import UsageError
from remtta.models.config import config_of


def labels_of(model: nn.Module) -> list[str] | None:
    """The class names of a timm model: its own, ImageNet's for 1,000 classes, or None."""
    return known_labels(model, config_of(model))


def set_labels(model: Any, labels: Sequence[str]) -> None:
    """Name the classes of a timm model; raise UsageError if there are more or fewer names than classes."""
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": checked_labels(labels, model)}


def read_labels(labels: Sequence[str] | str | Path | None) -> Sequence[str] | None:
    """Class names, which may be in a file of one per line.

    Raises:
        UsageError: If the file cannot be read.
    """
    if not isinstance(labels, (str, Path)):
        return labels
    try:
        lines = Path(labels).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UsageError(f"--labels: no such file: {labels}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--labels: {labels} cannot be read as UTF-8 text: {error}") from error
    return [line.removesuffix("\r") for line in lines]


def checked_labels(labels: Sequence[str], model: Any) -> list[str]:
    if len(labels) != model.num_classes:
        raise UsageError(f"the label file names {len(labels)} classes, but the model has {model.num_classes}")
    return list(labels)


def known_labels(model: Any, config: Mapping[str, Any]) -> list[str] | None:
    own = _own_labels(config)
    if own and len(own) == model.num_classes:
        return own
    subset = infer_imagenet_subset(model)
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return [info.index_to_description(index) for index in range(model.num_classes)]


def _own_labels(config: Mapping[str, Any]) -> list[str]:
    names = config.get("label_names") or ()
    if isinstance(names, Mapping):  # timm also takes class number -> name, whose numbers JSON makes text
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number[str(number)] for number in range(len(by_number)) if str(number) in by_number]
    return [str(name) for name in names]
