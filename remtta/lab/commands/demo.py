"""`remtta demo`: adapt an embedded model on an embedded stream."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.progress import ProgressBar
from remtta.cli.running import RunningOptions
from remtta.options.option import Option, Subset
from remtta.runs.folder import run_folder

_log = logging.getLogger(__name__)


def demo(
    running: Annotated[RunningOptions, Subset("threads", "quiet", "debug")],
    output: Annotated[
        Path | None, Option("Folder for the results.", flags=("--output", "-o"), default="runs/<UTC time>")
    ] = None,
    frames: Annotated[int, Option("Frames per condition.", min=20, max=10_000)] = 200,
    seed: Annotated[int, Option("Seed of the simulated drive.", min=0)] = 0,
    overwrite: Annotated[bool, Option("Replace an earlier demo in the folder.")] = False,
) -> None:
    """Adapt an embedded road sign classifier on a simulated drive into bad weather; no downloads.

    Runs the source model, then remtta, on the same frames. Prints the errors of both; writes predictions, the delta, a
    picture, and the frames in class folders, for remtta eval.

    Example:

      remtta demo --output demo
    """
    with running.command() as interrupts, run_folder(output) as folder:
        _log.info("loading torch ...")
        from remtta.deltas import DELTA
        from remtta.lab.demo.drive import LABELLED, PICTURE, run_demo

        running.set_threads()
        result = run_demo(
            folder,
            frames_per_condition=frames,
            seed=seed,
            overwrite=overwrite,
            callbacks=[ProgressBar(hidden=running.quiet)],
            interrupts=interrupts,
        )
        typer.echo(result.table())
        files = {"picture": folder / PICTURE, "delta": folder / "remtta" / DELTA, "labelled": folder / LABELLED}
        running.print_message("\n".join(f"{f'{name}:':<9} {path}" for name, path in files.items()))
