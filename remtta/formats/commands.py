"""`remtta export`: write an adapted model in other formats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from remtta.cli.running import RunningOptions, load_torch
from remtta.errors import UsageError
from remtta.files import check_not_input, check_target
from remtta.options import ModelOptions
from remtta.options.loaders import is_model_file
from remtta.options.option import Option, Subset


def export(
    output: Annotated[Path, Option("Folder for the files; with --adaptive a file.", flags=("--output", "-o"))],
    model: Annotated[
        ModelOptions,
        Subset(
            *("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "labels", "own"),
            *("mean", "std", "interpolation", "crop_pct"),
        ),
    ],
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="A run folder of remtta adapt, or a delta; with --adaptive also an ONNX file, or nothing for --model.",
        ),
    ] = None,
    format: Annotated[
        Literal["onnx", "peft", "timm"] | None, Option("Format to write.", flags=("--format", "-f"))
    ] = None,
    adaptive: Annotated[
        bool, Option("Write an ONNX file that adapts itself in any runtime, as the method fast.", flags=("--adaptive",))
    ] = False,
    source_data: Annotated[
        Path | None,
        Option(
            "With --adaptive, for an ONNX file without batch norms: clean images, by which to measure the convolutions "
            "that they were folded into.",
            metavar="FOLDER",
        ),
    ] = None,
    overwrite: Annotated[bool, Option("Replace files of the same names.")] = False,
) -> None:
    """Write the adapted model of RUN as ONNX, PEFT or timm files, and check them against torch.

    The model, its arguments and its checkpoint default to those of the delta.

    Examples:

      remtta export run1 --format onnx --output run1_onnx

      remtta export model.onnx --adaptive --source-data photographs --output adaptive.onnx
    """
    with running.command():
        if run is not None and is_model_file(run):
            if model.name is not None:
                raise UsageError(f"{run} and --model {model.name} are both models; leave one out")
            model, run = replace(model, name=str(run)), None
        _check(model, run, format, output, adaptive=adaptive, overwrite=overwrite)
        if source_data is not None and not adaptive:
            raise UsageError("--source-data is for --adaptive; leave it out")
        load_torch("remtta.deltas.base_model", model, run)
        from remtta.adapt.image_inputs import warn_of_guess
        from remtta.deltas.base_model import base_options
        from remtta.deltas.delta import load_delta
        from remtta.formats.export import adapted_model, check_packages, export_model, save_adaptive, source_model

        delta = None if run is None else load_delta(run)
        options = model if delta is None else base_options(delta, model)
        check_packages(format or "onnx", of_onnx=any(map(is_model_file, filter(None, options.files))))
        adapted = source_model(options) if delta is None else adapted_model(delta, options)
        if format is None:
            check_not_input(output, "--output", adapted.inputs)
            warn_of_guess(adapted.info.guessed)
            save_adaptive(adapted, output, source_data)
            files = [output]
        else:
            files = export_model(adapted, format, output, overwrite=overwrite)
        running.print_message("\n".join(map(str, files)))


def _check(
    model: ModelOptions, run: Path | None, format: str | None, output: Path, *, adaptive: bool, overwrite: bool
) -> None:
    """Raise UsageError if the arguments do not go together."""
    if adaptive:
        if format is not None:
            raise UsageError("--adaptive writes an ONNX file; leave --format out")
        if run is None and model.name is None:
            raise UsageError("name a run, a delta, an ONNX file, or a model with --model")
        check_target(output, "--output", ".onnx", overwrite=overwrite)
    elif run is None:
        raise UsageError("name a run or a delta; a model as it is needs --adaptive")
    elif format is None:
        raise UsageError("name a --format (onnx, peft or timm), or add --adaptive")
