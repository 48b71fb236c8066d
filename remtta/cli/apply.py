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
from remtta.options.loaders import is_model_file
from remtta.options.option import Subset

if TYPE_CHECKING:
    from torch import nn

_USE = "predict with it: remtta adapt FRAMES {} --method source"


def apply(
    delta: Annotated[
        Path, typer.Argument(metavar="DELTA", help="A delta.safetensors of remtta adapt, or its run folder.")
    ],
    target: TargetOptions,
    model: Annotated[
        ModelOptions, Subset("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "own")
    ],
    running: Annotated[RunningOptions, Subset("quiet", "debug", device="cpu")],
) -> None:
    """Write the adapted checkpoint: the base weights plus DELTA.

    Its predictions equal the adapted model's bit for bit. The model, its
    arguments and its checkpoint default to those of the delta. A model that
    is one file, such as an .onnx, is written as such a file.

    Example:

      remtta apply run1/delta.safetensors --checkpoint vit.safetensors --output adapted.safetensors
    """
    with running.command():
        is_whole = is_model_file(target.output)
        target.check(target.output.suffix if is_whole else ".safetensors")
        load_torch("remtta.deltas.base_model", model, delta)
        from remtta.deltas.base_model import base_options
        from remtta.deltas.delta import apply_delta, load_delta, save_weights
        from remtta.models.loading import load

        change = load_delta(delta)
        options = base_options(change, model)
        suffixes = options.loader.suffixes or (".safetensors",)
        if not target.output.name.lower().endswith(suffixes):
            more = "; remtta export writes other formats" if is_whole else ""
            raise UsageError(f"the base is {change.model}: write it with --output adapted{suffixes[0]}{more}")
        check_not_input(target.output, "--output", [change.path, *options.files])
        if is_whole:
            done = options.loader.write_adapted(change, options, target.output)
            running.print_message(
                f"{target.output}: {change.model} {done}\n"
                f"{_USE.format(shlex.join(['--model', str(target.output), *_own_words(options)]))}"
            )
            return
        from remtta.models.checkpoints import checkpoint_dtypes
        from remtta.models.unwrapping import custom_head

        base = load(options, device=running.device)
        apply_delta(base, change)
        source = options.loader.weights_file(options)
        known = source is not None and custom_head(base) is None  # else the weights' names are not the checkpoint's
        dtypes = checkpoint_dtypes(base, Path(str(source)), use_ema=options.use_ema) if known else None
        widened = save_weights(target.output, base, dtypes)
        note = f"; {len(widened)} adapted tensors in float32, which the base's dtype would round" if widened else ""
        running.print_message(
            f"{target.output}: {change.model} with {counted(len(change.tensors), 'adapted tensor')}{note}"
        )
        if "checkpoint" in options.loader.takes:
            words = f"{_loading_options(base, options)} --checkpoint {shlex.quote(str(target.output))}"
            running.print_message(_USE.format(words))


def _own_words(options: ModelOptions) -> list[str]:
    """Return the options that only some loaders have, as words of a command line."""
    texts = {name: value for name, value in options.own.items() if isinstance(value, str | Path)}
    return [word for name, value in texts.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _loading_options(base: nn.Module, options: ModelOptions) -> str:
    """Return the model's command-line options, with its preprocessing unless that is the default of its name."""
    from timm import get_pretrained_cfg
    from timm.data import resolve_data_config

    from remtta.models.loading import load
    from remtta.models.preprocessing import preprocessing_of

    name, chosen, default = options.name or "", preprocessing_of(base), {}
    words = [f"--model {shlex.quote(name)}"]
    if options.model_kwargs:
        words += ["--model-kwargs", shlex.join(f"{key}={value}" for key, value in options.model_kwargs.items())]
    words += [f"--num-classes {options.num_classes}"] if options.num_classes else []
    words += ["--input-size {} {}".format(*options.input_size)] if options.input_size else []
    words += [shlex.quote(word) for word in _own_words(options)]
    if options.loader.is_bundled:
        default = preprocessing_of(load(ModelOptions(name))).as_dict()
    elif ":" not in name and (known := get_pretrained_cfg(name)):
        default = resolve_data_config(pretrained_cfg=known.to_dict())
    preprocessing = chosen.as_dict()
    same = all(preprocessing[key] == default.get(key) for key in ("mean", "std", "interpolation", "crop_pct"))
    return " ".join([*words, *([] if same else [chosen.command_line])])
