"""`remtta report`: one page on runs and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import load_adapted
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.cli.reporting import say
from remtta.errors import UsageError


@dataclass(frozen=True)
class PageOptions:
    """The page to write."""

    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")]
    masks: Annotated[
        bool,
        typer.Option("--masks", help="Load the run's model, and show what REM's largest mask hides in the frames."),
    ] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing page.")] = False

    def check(self) -> None:
        """Refuse a file of another kind, and one that is there."""
        if self.output.suffix not in (".html", ".htm"):
            raise UsageError(f"--output {self.output} must end in .html")
        if not self.output.parent.is_dir():
            raise UsageError(f"--output: {self.output.parent}: no such folder; make it first")
        if self.output.exists() and not self.overwrite:
            raise UsageError(f"{self.output} exists; choose another --output or add --overwrite")


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs or evaluations, shown side by side.")],
    target: PageOptions,
    model: Annotated[
        ModelOptions,
        Only("model", "checkpoint", "use_ema", "num_classes", "model_kwargs", "input_size", "text_embeddings"),
    ],
    running: Annotated[RunningOptions, Only("device", "threads", "quiet", "debug")],
) -> None:
    """Write one HTML page on runs or evaluations: what happened over time, what changed, which frames to look at.

    It needs no network and no other file, so it can be mailed. The options of the model are for --masks; it
    defaults to the one the run's delta was made on.

    Examples:

      remtta report run1 run2 --output report.html

      remtta report run1 --masks --output report.html
    """
    with running.command() as interrupts:
        target.check()
        given = model.given()

        from remtta.report.report import write_report

        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        masked = None
        if target.masks:
            from remtta.report.masks import largest_mask, masked_frames

            config = largest_mask(folders)
            running.set_threads()
            masked = partial(masked_frames, load_adapted(folders[0], given, running.device), config, interrupts.check)
        write_report(folders, target.output, masked)
        if not running.quiet:
            say(str(target.output))
