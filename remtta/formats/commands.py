"""`remtta export`: write an adapted model in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from remtta.cli.running import RunningOptions, load_torch
from remtta.options import ModelOptions
from remtta.options.option import Option, Subset


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of remtta adapt, or a delta.")],
    format: Annotated[Literal["onnx", "peft", "timm"], Option("Format to write.", flags=("--format", "-f"))],
    output: Annotated[Path, Option("Folder for the files.", flags=("--output", "-o"))],
    model: Annotated[
        ModelOptions,
        Subset("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "labels", "own"),
    ],
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
    overwrite: Annotated[bool, Option("Replace files of the same names.")] = False,
) -> None:
    """Write the adapted model of RUN as ONNX, PEFT or timm files, and check them against torch.

    The model, its arguments and its checkpoint default to those of the delta.

    Example:

      remtta export run1 --format onnx --output run1_onnx
    """
    with running.command():
        load_torch("remtta.deltas.base_model", model, run)
        from remtta.deltas.base_model import base_options
        from remtta.deltas.delta import load_delta
        from remtta.formats.export import adapted_model, check_packages, export_model

        check_packages(format)
        delta = load_delta(run)
        adapted = adapted_model(delta, base_options(delta, model))
        files = export_model(adapted, format, output, overwrite=overwrite)
        running.print_message("\n".join(map(str, files)))
