"""Load a classifier through timm, with its labels and preprocessing."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch
from torch import nn

from remtta.errors import ModelError, UsageError
from remtta.lab.demo.embedded import CLASS_NAMES, EMBEDDED, MODEL_KWARGS, MODEL_NAME
from remtta.models.building import create
from remtta.models.card import built_from, checked_labels, given_preprocessing, known_labels, read_labels
from remtta.models.checkpoints import load_checkpoint
from remtta.models.huggingface import weights_file
from remtta.models.metadata import PretrainedConfig, TimmModel
from remtta.models.preprocessing import check_preprocessing, image_size
from remtta.models.unwrapping import config_of, is_timm_model
from remtta.options import DEFAULT_MODEL, ModelOptions
from remtta.zero_shot.classifier import classify_by_texts
from remtta.zero_shot.models import load_zero_shot
from remtta.zero_shot.prompts import is_zero_shot
from remtta.zero_shot.text_tower import OnTexts

_log = logging.getLogger(__name__)


def load_timm(options: ModelOptions, device: torch.device, on_texts: OnTexts | None = None) -> nn.Module:
    """Build timm's classifier, a zero-shot model or the embedded one; raise as `load_model` does."""
    name = options.name or DEFAULT_MODEL
    if name == EMBEDDED:
        names = ("use_ema", "num_classes", "model_kwargs", "input_size", "prompts", "text_embeddings")
        if other := [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]:
            raise UsageError(f"{EMBEDDED} is one fixed model; leave {' and '.join(other)} out")
        return _load_embedded(options, device)
    check_preprocessing(options.mean, options.std, options.interpolation, options.crop_pct)
    if options.use_ema and options.checkpoint is None:
        raise UsageError("--use-ema chooses among the weights of a --checkpoint, and none was given")
    labels = read_labels(options.labels)
    if is_zero_shot(name):
        return load_zero_shot(options, name, labels, device, on_texts)
    if options.prompts is not None:
        raise UsageError(f"--prompts are for zero-shot models (clip:...), and {name} has a head of its own")
    pretrained = options.checkpoint is None
    model = create(name, options, pretrained=pretrained)
    if options.text_embeddings is None:
        _check_classifier(model, name, options.num_classes, pretrained=pretrained)
    elif labels is not None:
        raise UsageError("--text-embeddings have class names of their own; leave --labels out")
    weights = weights_file(name, options.checkpoint)
    known = {} if weights is None else load_checkpoint(model, weights, use_ema=options.use_ema)
    if options.text_embeddings is not None:
        labels = classify_by_texts(model, name, options.text_embeddings)
    known |= given_preprocessing(options)
    config = {**model.pretrained_cfg, **known}
    if options.checkpoint is not None and not {"mean", "std"} & known.keys() and ":" not in name:
        _log_assumed(options.checkpoint, name, config)
    config["input_size"] = (3, *image_size(model, config))
    config["label_names"] = (
        known_labels(model.num_classes, config) if labels is None else checked_labels(labels, model.num_classes)
    )
    if pretrained and ":" not in name and config.get("tag"):  # a later version of timm may have another default
        name = f"{name.partition('.')[0]}.{config['tag']}"
    config["built_from"] = built_from(replace(options, name=name))
    model.pretrained_cfg = model.default_cfg = config
    return model.float().eval().to(device)


def _log_assumed(checkpoint: Path | str, name: str, config: PretrainedConfig) -> None:
    """Log the mean and standard deviation used for a file without them: models of the same shape differ in these."""
    mean, std = (" ".join(f"{value:.4g}" for value in config[key]) for key in ("mean", "std"))
    text = "%s does not record its preprocessing; using that of %s (--mean %s --std %s), which remtta doctor can check"
    _log.info(text, checkpoint, name, mean, std)


def _load_embedded(options: ModelOptions, device: torch.device) -> nn.Module:
    """Return the demo's model, with the given options in place of its own."""
    names, half = ("checkpoint", "mean", "std", "crop_pct", "labels", "interpolation"), (0.5, 0.5, 0.5)
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    built = ModelOptions(MODEL_NAME, num_classes=len(CLASS_NAMES), model_kwargs=MODEL_KWARGS, labels=CLASS_NAMES)
    with resources.as_file(resources.files("remtta.lab.demo") / "embedded.safetensors") as weights:
        embedded = replace(built, checkpoint=weights, mean=half, std=half, crop_pct=1.0)
        model = load_timm(replace(embedded, **chosen), device)
    assert is_timm_model(model)
    model.pretrained_cfg["built_from"] = built_from(ModelOptions(EMBEDDED, options.checkpoint))
    return model


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
