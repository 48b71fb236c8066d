"""`remtta inspect` and `remtta report`: show a delta, a run or an evaluation as text, or as an HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.errors import UsageError, counted
from remtta.files import check_target
from remtta.lab.tables import significance_mark
from remtta.options.option import Option, Subset
from remtta.runs.reading import aligned, printable, reading

if TYPE_CHECKING:
    from remtta.lab.report.inspection import Content

_COUNTS = ("frames", "skipped", "updates")


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
        from remtta.lab.report.inspection import describe_delta, describe_folder

        if not path.exists():
            raise UsageError(f"{path}: no such file or folder")
        with reading(path):
            content = describe_folder(path) if path.is_dir() else {"delta": describe_delta(path)}
            printed.show(content, lambda: "\n".join(map(printable, _lines(content))))


def _lines(content: Content) -> list[str]:
    from remtta.lab.report.inspection import evaluation_facts, run_facts

    lines: list[str] = []
    if "evaluation" in content:
        lines += [*_fact_lines(evaluation_facts(content)), "", *_result_lines(content["evaluation"])]
    if "site" in content:
        lines += _stream_group_lines(content["site"], alive=content["alive"])
    if "run" in content:
        lines += _fact_lines(run_facts(content))
    if "delta" in content:
        lines += _delta_lines(content["delta"])
    return lines


def _fact_lines(facts: dict[str, str]) -> list[str]:
    return [f"{name:<12} {text}" for name, text in facts.items()]


def _stream_group_lines(site: Content, *, alive: bool | None) -> list[str]:
    from remtta.lab.report.inspection import state_of

    streams = site["streams"]
    rows = [
        (name, *(str(run[count]) for count in _COUNTS), f"{state_of(run['exit_reason'], alive)}, {run['source']}")
        for name, run in streams.items()
    ]
    return [
        f"streams      {state_of(site['exit_reason'], alive)}; {counted(len(streams), 'stream')}",
        "",
        *aligned([("stream", *_COUNTS, "state, source"), *rows], left=(0, 4)),
    ]


def _result_lines(evaluation: Content) -> list[str]:
    rows = [
        (
            name,
            f"{result['mean']:.1f} %",
            "" if result["gain"] is None else f"{significance_mark(result)}{result['gain']:+.1f}",
            f"{100 * result['ece']:.1f}",
            "" if result["mean_std"] is None else f"± {result['mean_std']:.1f} over seeds",
        )
        for name, result in evaluation["methods"].items()
    ]
    return aligned([("method", "mean error", "gain", " ECE", ""), *rows], left=(0, 4)) if rows else []


def _delta_lines(delta: Content) -> list[str]:
    rows = [(layer["layer"], f"{layer['rms']:.2e}", f"{layer['max']:.2e}") for layer in delta["layers"]]
    moved = ", ".join(f"{change['class']} ({change['bias']:+.2f})" for change in delta["classes"])
    return [
        f"delta        {counted(delta['tensors'], 'tensor')}, {delta['parameters']} parameters, {delta['bytes']} bytes",
        f"made         {delta['created']} by remtta {delta['remtta_version']}, {delta['method']}, "
        f"{counted(delta['updates'], 'update')} on {counted(delta['frames'], 'frame')} from the source weights",
        f"base         {delta['model']}, {delta['base_sha256'][:12]}",
        "",
        *aligned([("layer", "rms change", "largest change"), *rows]),
        *(["", f"centred head, largest changes of the bias: class {moved}"] if moved else []),
    ]


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders of runs or evaluations, shown side by side.")
    ],
    output: Annotated[Path, Option("The .html file to write.", flags=("--output", "-o"))],
    running: Annotated[RunningOptions, Subset("quiet", "debug")],
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
        write_report(folders, output)
        running.print_message(str(output))
