"""Load a classifier through timm, with its labels and preprocessing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from remtta.errors import ModelError, UsageError
from remtta.models.building import create, current_name
from remtta.models.checkpoints import load_checkpoint
from remtta.models.info import given_preprocessing
from remtta.models.metadata import PretrainedConfig, TimmModel
from remtta.models.unwrapping import config_of, is_timm_model
from remtta.options import ModelOptions

ReplaceHead = Callable[[TimmModel], Sequence[str]]
"""Replaces the head of a timm model, in place, and returns the names of the new one's classes."""

_log = logging.getLogger(__name__)


def load_timm(options: ModelOptions, replace_head: ReplaceHead | None = None) -> TimmModel:
    """Build timm's classifier, or make one of an image tower; raise as `load_model` does."""
    model = create(options.name or "", options, pretrained=options.checkpoint is None)
    options = replace(options, name=current_name(options.name or ""))
    return load_into(model, options, options.checkpoint, replace_head)


def load_into(
    model: nn.Module, options: ModelOptions, weights: Path | str | None, replace_head: ReplaceHead | None = None
) -> TimmModel:
    """Load weights into a timm model that was built by the options, in place.

    Args:
        weights: Their file; None if it has them.
        replace_head: Replaces the head once the weights are loaded; without it, the model must be a classifier.
    """
    assert is_timm_model(model)
    name, pretrained = options.name or "", options.checkpoint is None
    if replace_head is None:
        _check_classifier(model, name, options.num_classes, pretrained=pretrained)
    known = {} if weights is None else load_checkpoint(model, Path(weights), use_ema=options.use_ema)
    if replace_head is not None:
        known["label_names"] = replace_head(model)
    config = {**model.pretrained_cfg, **known}
    if (
        options.checkpoint is not None
        and not {"mean", "std"} & {*known, *given_preprocessing(options)}
        and ":" not in name
    ):
        _log_assumed(options.checkpoint, name, config)
    if pretrained and ":" not in name and config.get("tag"):  # a later version of timm may have another default
        name = f"{name.partition('.')[0]}.{config['tag']}"
    model.pretrained_cfg = {**config, "built_from": {"name": name}}
    return model


def _log_assumed(checkpoint: Path | str, name: str, config: PretrainedConfig) -> None:
    """Log the mean and standard deviation used for a file without them: models of the same shape differ in these."""
    mean, std = (" ".join(f"{value:.4g}" for value in config[key]) for key in ("mean", "std"))
    text = "%s does not record its preprocessing; using that of %s (--mean %s --std %s): check that it fits"
    _log.info(text, checkpoint, name, mean, std)


def _check_classifier(model: TimmModel, name: str, num_classes: int | None, *, pretrained: bool) -> None:
    config = config_of(model)
    if not model.num_classes:
        raise ModelError(f"{name} has no classifier head; choose a classifier, or give --checkpoint and --num-classes")
    if getattr(model, "in_chans", 3) != 3:
        raise ModelError(f"{name} takes {model.in_chans} channels; remtta feeds RGB images")
    trained_for = config.get("num_classes")
    if pretrained and trained_for and num_classes is not None and num_classes != trained_for:
        raise UsageError(
            f"{name} comes with a head for {trained_for} classes; with --num-classes {num_classes} its head "
            "would be untrained, so give your fine-tuned weights with --checkpoint"
        )
