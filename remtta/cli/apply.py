"""`remtta apply`: base plus delta to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.loading import model_arguments
from remtta.cli.reporting import command
from remtta.errors import UsageError


def apply(
    delta: Annotated[Path, typer.Argument(help="A delta.safetensors of remtta adapt, or its run folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .safetensors checkpoint to write.")],
    model: opt.Model = None,
    checkpoint: opt.Checkpoint = None,
    use_ema: opt.UseEma = False,
    num_classes: opt.NumClasses = None,
    model_kwargs: opt.ModelKwargs = None,
    input_size: opt.InputSize = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    device: opt.Device = "cpu",
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Write the adapted checkpoint: the base weights with DELTA added.

    Its predictions equal the adapted model's bit for bit. The model, its
    arguments and its checkpoint default to the ones the delta was made on.

    Example:

      remtta apply run1/delta.safetensors --checkpoint vit.safetensors --output adapted.safetensors
    """
    kwargs = opt.parse_pairs(model_kwargs)
    with command(quiet=quiet, debug=debug):
        from remtta.deltas.delta import apply_delta, load_delta, save_weights
        from remtta.models.checkpoints import checkpoint_dtypes
        from remtta.models.loading import load_model

        if output.suffix != ".safetensors":
            raise UsageError(f"--output {output} must end in .safetensors")
        if output.exists() and not overwrite:
            raise UsageError(f"{output} exists; choose another --output or add --overwrite")
        change = load_delta(delta)
        arguments = model_arguments(
            {
                "name": model,
                "checkpoint": checkpoint,
                "use_ema": use_ema,
                "num_classes": num_classes,
                "model_kwargs": kwargs,
                "input_size": input_size,
            },
            change,
        )
        base = load_model(**arguments, device=device)
        apply_delta(base, change)
        source = arguments.get("checkpoint")
        for needed in (change.path, source):
            if needed and output.exists() and output.samefile(needed):
                raise UsageError(f"--output {output} would replace {needed}, which it is made from; choose another")
        dtypes = checkpoint_dtypes(base, Path(source), use_ema=bool(arguments.get("use_ema"))) if source else None
        widened = save_weights(output, base, dtypes)
        if not quiet:
            note = f"; {len(widened)} adapted tensors in float32, which the base's dtype would round" if widened else ""
            typer.echo(f"{output}: {change.model} with {len(change.tensors)} adapted tensors{note}", err=True)
