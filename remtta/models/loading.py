"""Load a classifier with its labels and preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.errors import UsageError
from remtta.models.preprocessing import check_preprocessing
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
        mean=_as_tuple(mean, 3),
        std=_as_tuple(std, 3),
        input_size=_as_tuple(input_size, 2),
        interpolation=interpolation,
        crop_pct=crop_pct,
        **own,
    )
    return load(options, device=device, on_texts=on_texts)


def _as_tuple(value: float | Sequence[float] | None, count: int) -> Any:
    """Return several numbers as a tuple, and a single one `count` times."""
    if value is None:
        return None
    return (value,) * count if isinstance(value, int | float) else tuple(value)


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
def load(options: ModelOptions, *, device: str | torch.device = "cpu", on_texts: OnTexts | None = None) -> nn.Module:
    """Build a classifier with the options of the command line, as `load_model` does."""
    options = replace(options, name=options.name or DEFAULT_MODEL)
    options.check()
    check_preprocessing(options.mean, options.std, options.interpolation, options.crop_pct)
    if options.use_ema and options.checkpoint is None:
        raise UsageError("--use-ema chooses among the weights of a --checkpoint, and none was given")
    return options.loader.load(options, device, on_texts)


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
