"""`remtta apply`: from base and delta to a checkpoint."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.classifiers import load_torch
from remtta.cli.doctor import options_text
from remtta.cli.running import RunningOptions, TargetOptions
from remtta.errors import counted
from remtta.files import check_not_input
from remtta.options import ModelOptions
from remtta.options.option import Subset

if TYPE_CHECKING:
    from torch import nn

    from remtta.deltas.delta import Delta


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
    model is written whole, in float32, for open_clip and --checkpoint.

    Example:

      remtta apply run1/delta.safetensors --checkpoint vit.safetensors --output adapted.safetensors
    """
    with running.command():
        target.check()
        load_torch("remtta.deltas.base_model", model, delta)
        from remtta.deltas.base_model import base_options
        from remtta.deltas.delta import apply_delta, load_delta, save_weights
        from remtta.models.checkpoints import checkpoint_dtypes
        from remtta.models.huggingface import weights_file, weights_place
        from remtta.models.loading import load
        from remtta.models.prompts import is_zero_shot

        change = load_delta(delta)
        wanted = base_options(change, model)
        base = load(wanted, device=running.device)
        apply_delta(base, change)
        where = wanted.name or "", wanted.checkpoint
        check_not_input(target.output, "--output", (change.path, weights_place(*where), wanted.text_embeddings))
        source = weights_file(*where)
        by_texts = is_zero_shot(wanted.name or "") or wanted.text_embeddings  # text embeddings: the weights are renamed
        plain = None if by_texts else source
        dtypes = checkpoint_dtypes(base, plain, use_ema=wanted.use_ema) if plain else None
        widened = save_weights(target.output, base, dtypes)
        use = f"{_how_to_load(base, wanted)} --checkpoint {shlex.quote(str(target.output))} --method source"
        running.tell(f"{target.output}: {_report(change, widened)}\npredict with it: remtta adapt FRAMES {use}")


def _report(change: Delta, widened: Collection[str]) -> str:
    note = f"; {len(widened)} adapted tensors in float32, which the base's dtype would round" if widened else ""
    return f"{change.model} with {counted(len(change.tensors), 'adapted tensor')}{note}"


def _how_to_load(base: nn.Module, wanted: ModelOptions) -> str:
    """Return the options of the model, and of the preprocessing unless a model of this name has it without them."""
    from timm import get_pretrained_cfg
    from timm.data import resolve_data_config

    from remtta.models.embedded import EMBEDDED
    from remtta.models.loading import load
    from remtta.models.preprocessing import preprocessing_of

    name, own, usual = wanted.name or "", preprocessing_of(base).as_dict(), {}
    options = [f"--model {shlex.quote(name)}"]
    if wanted.model_kwargs:
        options += ["--model-kwargs", shlex.join(f"{key}={value}" for key, value in wanted.model_kwargs.items())]
    options += [f"--num-classes {wanted.num_classes}"] if wanted.num_classes else []
    options += ["--input-size {} {}".format(*wanted.input_size)] if wanted.input_size else []
    options += [f"--text-embeddings {shlex.quote(str(wanted.text_embeddings))}"] if wanted.text_embeddings else []
    if name == EMBEDDED:
        usual = preprocessing_of(load(ModelOptions(name))).as_dict()
    elif ":" not in name and (known := get_pretrained_cfg(name)):
        usual = resolve_data_config(pretrained_cfg=known.to_dict())
    same = all(own[each] == usual.get(each) for each in ("mean", "std", "interpolation", "crop_pct"))
    return " ".join([*options, *([] if same else [options_text(own)])])
