"""`remtta report`: write a page on runs and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.classifiers import load_adapted
from remtta.cli.running import RunningOptions, TargetOptions
from remtta.errors import UsageError
from remtta.options import ModelOptions
from remtta.options.option import Only, Option


@dataclass(frozen=True, kw_only=True)
class PageOptions(TargetOptions):
    """The page to write."""

    output: Annotated[Path, Option("The .html file to write.", flags=("--output", "-o"))]
    masks: Annotated[
        bool, Option("Load the run's model, and show the patches that REM's largest mask hides.", more="report.md")
    ] = False


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of runs or evaluations, shown side by side.")
    ],
    target: PageOptions,
    model: Annotated[
        ModelOptions,
        Only("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "text_embeddings"),
    ],
    running: Annotated[RunningOptions, Only("device", "threads", "quiet", "debug")],
) -> None:
    """Write an HTML page on runs or evaluations: charts over time, changed layers, frames to look at.

    The page needs no network and no other file. The model options are for --masks, and default to those of the run's
    delta.

    Examples:

      remtta report run1 run2 --output report.html

      remtta report run1 --masks --output report.html
    """
    with running.command() as interrupts:
        target.check(".html")

        from remtta.report.content import write_report

        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        masked = None
        if target.masks:
            from remtta.report.masks import largest_mask, masked_frames

            config = largest_mask(folders)
            running.set_threads()
            masked = partial(masked_frames, load_adapted(folders[0], model, running.device), config, interrupts.check)
        write_report(folders, target.output, masked)
        running.tell(str(target.output))
