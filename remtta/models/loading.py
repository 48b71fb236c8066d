"""Load a classifier with its labels and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.errors import CheckpointError, UsageError
from remtta.models.info import built_from, checked_labels, given_preprocessing, labels_of, read_labels
from remtta.models.preprocessing import as_tuple, check_preprocessing, image_size
from remtta.models.unwrapping import num_classes_of, unwrap_model
from remtta.options import DEFAULT_MODEL, ModelOptions
from remtta.options.loaders import OnTexts


def load_model(
    name: str,
    *,
    checkpoint: str | Path | None = None,
    use_ema: bool = False,
    num_classes: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    input_size: int | tuple[int, int] | None = None,
    interpolation: str | None = None,
    crop_pct: float | None = None,
    labels: Sequence[str] | str | Path | None = None,
    on_texts: OnTexts | None = None,
    device: str | torch.device = "cpu",
    **own: Any,
) -> nn.Module:
    """Build a classifier with its weights, in eval mode and fp32.

    Preprocessing, labels and origin are stored in timm's own `pretrained_cfg`; arguments given here override the
    checkpoint's values.

    Args:
        name: timm model name, "hf-hub:...", "local-dir:...", or what another loader takes, of a part of remtta (a
            folder of transformers, "clip:...", an ONNX file, "remtta-demo") or of another package.
        checkpoint: Weights file; without one, timm's pretrained weights are used, downloaded on first use. This and
            the others are as in `ModelOptions`.
        mean: Of pixels in [0, 1], per channel; one number for all. Likewise `std`.
        input_size: Height and width in pixels; one number for both.
        on_texts: Called with the progress of a zero-shot model's class embeddings.
        device: Device of the model.
        own: Options that only some loaders have, such as `prompts` and `text_embeddings` of zero-shot models, and
            `output_name` and `provider` of ONNX files.

    Returns:
        The timm model, or one with the same interface.

    Raises:
        ModelError: If the model cannot be built or is not a classifier of RGB images.
        DownloadError: If the weights cannot be downloaded.
        CheckpointError: If the checkpoint is unreadable, unsafe or does not fit.
        UsageError: If the name is unknown or a value is invalid.
    """
    options = ModelOptions.from_arguments(
        name=name,
        checkpoint=checkpoint,
        use_ema=use_ema,
        num_classes=num_classes,
        model_kwargs=model_kwargs or {},
        labels=labels,
        mean=as_tuple(mean, 3),
        std=as_tuple(std, 3),
        input_size=as_tuple(input_size, 2),
        interpolation=interpolation,
        crop_pct=crop_pct,
        **own,
    )
    return load(options, device=device, on_texts=on_texts)


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def load(
    options: ModelOptions,
    *,
    device: str | torch.device = "cpu",
    on_texts: OnTexts | None = None,
    to_check: bool = False,
) -> nn.Module:
    """Build a classifier with the options of the command line, as `load_model` does; with `to_check`, also one that
    adapts itself.
    """
    options = replace(options, name=options.name or DEFAULT_MODEL)
    options.check()
    check_preprocessing(options.mean, options.std, options.interpolation, options.crop_pct, options.input_size)
    if options.use_ema and options.checkpoint is None:
        raise UsageError("--use-ema chooses among the weights of a --checkpoint, and none was given")
    labels, loader = read_labels(options.labels), options.loader
    try:
        load_any = loader.load_to_check if to_check else loader.load
        model = load_any(options, device, on_texts).float().eval()
    except OSError as error:
        kind = UsageError if isinstance(error, FileNotFoundError) else CheckpointError
        raise kind(f"{options.name} cannot be loaded: {error}") from error
    _describe(model, options, labels)
    return model if loader.has_own_devices else model.to(select_device(device))


def _describe(model: Any, options: ModelOptions, labels: Sequence[str] | None) -> None:
    """Complete the `pretrained_cfg` of a model: given preprocessing and labels replace its own."""
    given = given_preprocessing(options)
    model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **given}
    unwrapped = unwrap_model(model)  # by a pass of an image of this size, where it is not timm's
    if unwrapped.front and given.keys() & {"mean", "std"}:
        raise UsageError(f"{options.name} normalises images itself; leave --mean and --std out")
    size = given.get("input_size", ())[1:]
    if size and not unwrapped.is_timm and unwrapped.trace.input_size != size:
        raise UsageError(f"{options.name} takes no images of {size[0]} x {size[1]} pixels")
    module: Any = unwrapped.module
    config = {**(getattr(module, "pretrained_cfg", None) or {}), **model.pretrained_cfg}
    if config.get("input_size"):
        config["input_size"] = (3, *image_size(module, config))
    config["label_names"] = labels_of(model) if labels is None else checked_labels(labels, num_classes_of(model))
    config["built_from"] = {**built_from(options), **(config.get("built_from") or {})}
    module.pretrained_cfg = module.default_cfg = config


def select_device(device: str | torch.device) -> torch.device:
    """Return a device by name, or for "auto" CUDA, then MPS, then the CPU; raise UsageError if it is not there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f'unknown device "{device}"; choose auto, cpu, cuda or mps') from error
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    exists = chosen.type != "cuda" or (chosen.index or 0) < torch.cuda.device_count()
    if not usable.get(chosen.type, False) or not exists:
        raise UsageError(f'device "{device}" is not available on this machine; use --device cpu')
    return chosen
