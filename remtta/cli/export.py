"""`remtta export`: write the adapted model for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from remtta.cli.classifiers import load_torch
from remtta.cli.running import RunningOptions
from remtta.options import ModelOptions
from remtta.options.option import Option, Subset


@dataclass(frozen=True)
class ExportOptions:
    """The files to write."""

    form: Annotated[Literal["onnx", "peft", "timm"], Option("Format to write.", flags=("--format", "-f"))]
    output: Annotated[Path, Option("Folder for the files.", flags=("--output", "-o"))]
    overwrite: Annotated[bool, Option("Replace files of the same names.")] = False


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of remtta adapt, or a delta.")],
    exported: ExportOptions,
    model: Annotated[
        ModelOptions,
        Subset(
            "name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "labels", "text_embeddings"
        ),
    ],
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
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
        from remtta.export.adapted import adapted_model
        from remtta.export.formats import export as write

        delta = load_delta(run)
        adapted = adapted_model(delta, base_options(delta, model))
        files = write(adapted, exported.form, exported.output, overwrite=exported.overwrite)
        running.tell("\n".join(map(str, files)))
