"""`remtta report`: write a page on runs and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.running import RunningOptions, TargetOptions
from remtta.errors import UsageError
from remtta.options.option import Option, Subset


@dataclass(frozen=True, kw_only=True)
class PageOptions(TargetOptions):
    """The page to write."""

    output: Annotated[Path, Option("The .html file to write.", flags=("--output", "-o"))]


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of runs or evaluations, shown side by side.")
    ],
    target: PageOptions,
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
) -> None:
    """Write an HTML page on runs or evaluations: charts over time, changed layers, frames to look at.

    The page needs no network and no other file.

    Example:

      remtta report run1 run2 --output report.html
    """
    with running.command():
        target.check(".html")

        from remtta.report.page import write_report

        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        write_report(folders, target.output)
        running.tell(str(target.output))
