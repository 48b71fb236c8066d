"""`remtta score`: the error of a run on frames that were labelled by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.options.option import Option, Subset


def score(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of remtta adapt.")],
    labels: Annotated[
        Path,
        typer.Argument(
            metavar="LABELS",
            help="A TSV or CSV of frames, by source path, file name or index, and classes, by number or name.",
        ),
    ],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("debug")],
    source: Annotated[
        Path | None,
        Option(
            "A run with --method source on the same frames, to compare with; by default what RUN recorded.",
            metavar="RUN",
        ),
    ] = None,
) -> None:
    """Compare a run with its source model on labelled frames: error, gain, per class and over time.

    Examples:

      remtta adapt clip.mp4 --save-frames 100 --output run1

      remtta score run1 run1/saved_frames/labels.tsv
    """
    with running.command():
        from remtta.lab.scores import score_lines, score_run

        content = score_run(run, labels, source)
        printed.show(content, lambda: "\n".join(score_lines(content)))
