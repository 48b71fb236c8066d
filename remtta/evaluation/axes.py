"""Grids of evaluations over checkpoints or severities: a folder for each, and one table of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from remtta.errors import UsageError
from remtta.evaluation.tables import Case, axes_table, csv_tables
from remtta.files import write_atomically
from remtta.runs.folder import PREDICTIONS, RESULTS, refuse_others_files

AXES_TABLE, AXES_CSV = "axes.md", "axes.csv"


def checkpoint_names(paths: Sequence[Path]) -> list[str]:
    """Return a distinct name per checkpoint: the file's stem, preceded by as many parent folders as needed.

    Raises:
        UsageError: If a file does not exist, or two cannot be told apart.
    """
    for path in paths:
        if not path.is_file():
            raise UsageError(f"{path}: no such file")
    parts = [(*path.absolute().parent.parts[1:], path.stem.removesuffix(".pth")) for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UsageError("--checkpoint names the same file twice, or in two formats; leave one out")


def folder_of(output: Path, case: Case) -> Path:
    """Return the folder of a case's evaluation."""
    return output.joinpath(*(f"{axis}{value}" if axis == "severity" else value for axis, value in case))


def check_folders(output: Path, cases: Sequence[Case], *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError before anything runs if a folder cannot hold the grid, or one of its evaluations."""
    if (output / RESULTS).exists() and () not in cases:
        raise UsageError(f"{output} holds a single evaluation; choose another --output for several")
    for folder in (folder_of(output, case) for case in cases):
        refuse_earlier(folder, overwrite=overwrite, resume=resume)
        if not (overwrite or resume):
            refuse_others_files(folder)


def refuse_earlier(folder: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError if a folder holds an earlier evaluation that may not be replaced, and cannot be resumed."""
    earlier = [name for name in (RESULTS, PREDICTIONS) if (folder / name).exists()]
    if earlier == [PREDICTIONS] and resume:
        raise UsageError(f"{folder} has no {RESULTS}, so it cannot be resumed; --overwrite replaces it")
    if earlier and not (overwrite or resume):
        raise UsageError(
            f"{folder} holds an earlier evaluation; continue it with --resume, replace it with --overwrite, "
            "or choose another --output"
        )


def write_axes(output: Path, evaluations: Mapping[Case, Mapping[str, Any]]) -> None:
    """Write the table of all evaluations as Markdown, and as CSV with every domain."""
    for name, text in {AXES_TABLE: axes_table(evaluations), AXES_CSV: csv_tables(evaluations)}.items():
        write_atomically(output / name, partial(Path.write_text, data=text, encoding="utf-8"))
