"""A command for remtta in its own package: how often a run predicted each class."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.options.option import Option, Subset
from remtta.runs.reading import printable, read_rows


def classes(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of remtta adapt.")],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("debug")],
    most: Annotated[int, Option("Number of classes to list.", min=1)] = 10,
) -> None:
    """Count the classes that a run predicted, most frequent first."""
    with running.command():  # messages, signals, errors in a line, exit codes
        rows = read_rows(run / "predictions.jsonl")
        found = Counter(str(row.get("label") or row["class"]) for row in rows if "class" in row)
        counts = dict(found.most_common(most))
        printed.show(counts, lambda: "\n".join(f"{count:6}  {printable(name)}" for name, count in counts.items()))
