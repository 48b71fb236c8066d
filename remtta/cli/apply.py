"""`remtta apply`: base plus delta to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.reporting import command
from remtta.errors import UsageError


def apply(
    delta: Annotated[Path, typer.Argument(help="A delta.safetensors of remtta adapt.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors checkpoint to write.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="timm model name, hf-hub:... or local-dir:... Default: the delta's."),
    ] = None,
    checkpoint: opt.Checkpoint = None,
    use_ema: opt.UseEma = False,
    num_classes: opt.NumClasses = None,
    model_kwargs: opt.ModelKwargs = None,
    input_size: opt.InputSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Write the adapted checkpoint: the base weights with DELTA added.

    Its predictions equal the adapted model's bit for bit. The model and its
    arguments default to the ones the delta names.

    Example:

      remtta apply run1/delta.safetensors --checkpoint vit.safetensors --output adapted.safetensors
    """
    kwargs = opt.parse_model_kwargs(model_kwargs)
    with command(quiet=quiet, debug=debug):
        from remtta.checkpoints import checkpoint_dtypes
        from remtta.deltas import apply_delta, load_delta, save_weights
        from remtta.models import load_model

        if output.suffix != ".safetensors":
            raise UsageError(f"--output {output} must end in .safetensors")
        if output.exists() and not overwrite:
            raise UsageError(f"{output} exists; choose another --output or add --overwrite")
        change = load_delta(delta)
        made_with = change.model_options
        use_ema = use_ema or bool(made_with.get("use_ema"))
        base = load_model(
            model or change.model,
            checkpoint=checkpoint,
            use_ema=use_ema and checkpoint is not None,
            num_classes=num_classes or made_with.get("num_classes"),
            model_kwargs=kwargs or made_with.get("model_kwargs"),
            input_size=input_size or made_with.get("input_size"),
        )
        apply_delta(base, change)
        dtypes = checkpoint_dtypes(base, checkpoint, use_ema=use_ema) if checkpoint else None
        widened = save_weights(output, base, dtypes)
        if not quiet:
            note = f"; {len(widened)} adapted tensors in float32, which the base's dtype would round" if widened else ""
            typer.echo(f"{output}: {change.model} with {len(change.tensors)} adapted tensors{note}", err=True)
