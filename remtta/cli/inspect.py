"""`remtta inspect`: show a delta, a run or an evaluation as text or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.errors import UsageError
from remtta.extensions import load_of_part
from remtta.options.option import Subset
from remtta.runs.folder import RESULTS, STREAM_GROUP
from remtta.runs.reading import printable, reading

if TYPE_CHECKING:
    from remtta.runs.inspection import Inspection

_OF_PARTS = {
    STREAM_GROUP: ("the runs of many streams", "remtta.deployment.inspection:inspect_streams"),
    RESULTS: ("an evaluation", "remtta.lab.report.evaluations:inspect_evaluation"),
}
"""Folders that a part of remtta describes, by the file that identifies them."""


def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A delta, or the folder of a run, of many streams or of an evaluation."),
    ],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("debug")],
) -> None:
    """Summarise a delta, a run or an evaluation: settings, predictions, layers that changed.

    Examples:

      remtta inspect runs/20261120T120000Z

      remtta inspect run1/delta.safetensors --json | jq .delta.layers
    """
    with running.command():
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        with reading(path):
            inspected = _inspected(path)
        printed.show(inspected.content, lambda: "\n".join(map(printable, inspected.lines)))


def _inspected(path: Path) -> Inspection:
    from remtta.runs.inspection import inspect_delta, inspect_run, kind_of

    if not path.is_dir():
        return inspect_delta(path)
    if (kind := kind_of(path)) not in _OF_PARTS:
        return inspect_run(path)
    what, target = _OF_PARTS[kind]
    described: Inspection = load_of_part(target, f"{path} holds {what}, which")(path)
    return described
