"""`remtta report`: one page on runs and evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.groups import Only
from remtta.cli.options.running import RunningOptions
from remtta.cli.reporting import say
from remtta.errors import UsageError


@dataclass(frozen=True)
class PageOptions:
    """The page to write."""

    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")]
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
    running: Annotated[RunningOptions, Only("quiet", "debug")],
) -> None:
    """Write one HTML page on runs or evaluations: what happened over time, what changed, which frames to look at.

    It needs no network and no other file, so it can be mailed.

    Example:

      remtta report run1 run2 --output report.html
    """
    with running.command():
        target.check()

        from remtta.report.report import write_report

        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{folder}: no such folder")
        write_report(folders, target.output)
        if not running.quiet:
            say(str(target.output))
