"""`remtta apply`: write an adapted model to a checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.running import RunningOptions, TargetOptions, load_torch
from remtta.errors import UsageError, counted
from remtta.files import check_not_input
from remtta.options import ModelOptions
from remtta.options.model import is_onnx
from remtta.options.option import Subset

if TYPE_CHECKING:
    from torch import nn


def apply(
    delta: Annotated[
        Path, typer.Argument(metavar="DELTA", help="A delta.safetensors of remtta adapt, or its run folder.")
    ],
    target: TargetOptions,
    model: Annotated[
        ModelOptions,
        Subset("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "text_embeddings"),
    ],
    running: Annotated[RunningOptions, Subset("quiet", "debug", device="cpu")],
) -> None:
    """Write the adapted checkpoint: the base weights plus DELTA.

    Its predictions equal the adapted model's bit for bit. The model, its
    arguments and its checkpoint default to those of the delta. A zero-shot
    model is written whole, in float32, for open_clip and --checkpoint. The
    delta of an ONNX file gives an ONNX file.

    Example:

      remtta apply run1/delta.safetensors --checkpoint vit.safetensors --output adapted.safetensors
    """
    with running.command():
        onnx = is_onnx(str(target.output))
        target.check(".onnx" if onnx else ".safetensors")
        load_torch("remtta.deltas.base_model", model, delta)
        from remtta.deltas.base_model import base_options
        from remtta.deltas.delta import apply_delta, load_delta, save_weights
        from remtta.models.loading import load
        from remtta.zero_shot.prompts import is_zero_shot

        change = load_delta(delta)
        options = base_options(change, model)
        if onnx != options.is_onnx:
            other = "the base is an ONNX file: write one with --output adapted.onnx"
            raise UsageError("the base is no ONNX file; remtta export --format onnx writes one" if onnx else other)
        if onnx:
            from remtta.formats.export import adapted_model, save_onnx

            check_not_input(target.output, "--output", (change.path, options.checkpoint))
            save_onnx(adapted_model(change, options), target.output)
            running.print_message(f"{target.output}: {change.model} with shifted logits, checked by onnxruntime")
            return
        from remtta.models.checkpoints import checkpoint_dtypes
        from remtta.models.huggingface import weights_file

        name, embeddings = options.name or "", options.text_embeddings
        base = load(options, device=running.device)
        apply_delta(base, change)
        check_not_input(target.output, "--output", (change.path, options.weights_place, embeddings))
        source = weights_file(name, options.checkpoint)
        renamed = is_zero_shot(name) or embeddings  # then the weights' names are not the checkpoint's
        dtypes = checkpoint_dtypes(base, source, use_ema=options.use_ema) if source and not renamed else None
        widened = save_weights(target.output, base, dtypes)
        note = f"; {len(widened)} adapted tensors in float32, which the base's dtype would round" if widened else ""
        running.print_message(
            f"{target.output}: {change.model} with {counted(len(change.tensors), 'adapted tensor')}{note}\n"
            f"predict with it: remtta adapt FRAMES {_loading_options(base, options)} "
            f"--checkpoint {shlex.quote(str(target.output))} --method source"
        )


def _loading_options(base: nn.Module, options: ModelOptions) -> str:
    """Return the model's command-line options, with its preprocessing unless that is the default of its name."""
    from timm import get_pretrained_cfg
    from timm.data import resolve_data_config

    from remtta.lab.demo.embedded import EMBEDDED
    from remtta.models.loading import load
    from remtta.models.preprocessing import preprocessing_of

    name, chosen, default = options.name or "", preprocessing_of(base), {}
    words = [f"--model {shlex.quote(name)}"]
    if options.model_kwargs:
        words += ["--model-kwargs", shlex.join(f"{key}={value}" for key, value in options.model_kwargs.items())]
    words += [f"--num-classes {options.num_classes}"] if options.num_classes else []
    words += ["--input-size {} {}".format(*options.input_size)] if options.input_size else []
    words += [f"--text-embeddings {shlex.quote(str(options.text_embeddings))}"] if options.text_embeddings else []
    if name == EMBEDDED:
        default = preprocessing_of(load(ModelOptions(name))).as_dict()
    elif ":" not in name and (known := get_pretrained_cfg(name)):
        default = resolve_data_config(pretrained_cfg=known.to_dict())
    preprocessing = chosen.as_dict()
    same = all(preprocessing[key] == default.get(key) for key in ("mean", "std", "interpolation", "crop_pct"))
    return " ".join([*words, *([] if same else [chosen.command_line])])
