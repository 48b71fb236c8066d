"""`remtta report`: show runs and evaluations on an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.running import RunningOptions
from remtta.errors import UsageError
from remtta.files import check_target
from remtta.options.option import Option, Subset


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of runs or evaluations, shown side by side.")
    ],
    output: Annotated[Path, Option("The .html file to write.", flags=("--output", "-o"))],
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
    labels_file: Annotated[
        Path | None, Option("Classes of some frames of the runs, as for remtta score.", metavar="FILE")
    ] = None,
    overwrite: Annotated[bool, Option("Replace an existing file.")] = False,
) -> None:
    """Write an HTML page on runs or evaluations: charts over time, changed layers, frames to look at.

    The page needs no network and no other file.

    Example:

      remtta report run1 run2 --output report.html
    """
    with running.command():
        check_target(output, "--output", ".html", overwrite=overwrite)
        from remtta.lab.report.page import write_report

        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        write_report(folders, output, labels_file)
        running.print_message(str(output))
