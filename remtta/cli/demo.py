"""`remtta demo`: the whole thing on an embedded model and stream."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.reporting import command
from remtta.runs.folder import default_folder


def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for everything. Default: runs/<UTC time>.")
    ] = None,
    frames: Annotated[
        int | None, typer.Option(min=20, help="Frames per condition. Default: enough for a table.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which drive to draw.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier demo in the folder.")] = False,
    threads: opt.Threads = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Adapt an embedded classifier of road signs on a drive into bad weather; nothing is downloaded.

    Runs the source model, then REM, over the same labelled frames. Prints the
    error of both and writes predictions, delta and a picture.

    Example:

      remtta demo --output demo
    """
    with command(quiet=quiet, debug=debug) as interrupts:
        import torch

        from remtta.demo.drive import FRAMES_PER_CONDITION, run_demo

        if threads:
            torch.set_num_threads(threads)
        result = run_demo(
            output or default_folder(),
            frames_per_condition=frames or FRAMES_PER_CONDITION,
            seed=seed,
            overwrite=overwrite,
            interrupts=interrupts,
        )
        typer.echo(result.table())
        if not quiet:
            typer.echo(f"picture: {result.picture}\ndelta:   {result.delta}", err=True)
