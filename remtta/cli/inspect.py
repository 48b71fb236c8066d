"""`remtta inspect`: show the content of a delta or the folder of a run or evaluation, or compare two deltas."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from remtta.cli.running import PrintOptions, RunningOptions
from remtta.errors import UsageError, counted
from remtta.options.option import Only, Option
from remtta.runs.reading import printable


@dataclass(frozen=True)
class RowsOptions(PrintOptions):
    """The content and format of standard output."""

    rows_as: Annotated[
        Literal["csv", "parquet"] | None,
        Option("Print the predictions as a table.", flags=("--format",), more="files.md#as-a-table"),
    ] = None


def inspect(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A delta, or the folder of a run, of many streams or of an evaluation."),
    ],
    printed: RowsOptions,
    running: Annotated[RunningOptions, Only("debug")],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="OTHER", help="Another delta or run of the same model; shows their distance by layer."),
    ] = None,
) -> None:
    """Summarise a delta, a run or an evaluation: settings, predictions, layers that changed.

    Examples:

      remtta inspect runs/20261120T120000Z

      remtta inspect run1/delta.safetensors --json | jq .delta.layers

      remtta inspect night1 night2

      remtta inspect run1 --format csv > run1.csv
    """
    with running.command():
        from remtta.report.inspection import compare_deltas, describe_delta, describe_folder

        for each in (path, other or path):
            if not each.exists():
                raise UsageError(f"{each}: no such file or folder")
        if printed.rows_as is not None:
            _print_rows(path, other, printed)
            return
        if other is not None:
            content = compare_deltas(path, other)
        else:
            content = describe_folder(path) if path.is_dir() else {"delta": describe_delta(path)}
        typer.echo(json.dumps(content, indent=2) if printed.as_json else "\n".join(map(printable, _lines(content))))


def _print_rows(folder: Path, other: Path | None, printed: RowsOptions) -> None:
    from remtta.report.tabular import write_table

    assert printed.rows_as
    if other is not None or printed.as_json:
        raise UsageError("--format prints the predictions of one run; leave out --json and the second run")
    if printed.rows_as == "parquet" and sys.stdout.isatty():
        raise UsageError("--format parquet writes binary data; add > FILE.parquet")
    write_table(folder, printed.rows_as, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def _lines(content: dict[str, Any]) -> list[str]:
    from remtta.report.facts import evaluation_facts, run_facts

    if "deltas" in content:
        return _comparison_lines(content["layers"])
    lines: list[str] = []
    if "evaluation" in content:
        lines += [*_fact_lines(evaluation_facts(content)), "", *_result_lines(content["evaluation"])]
    if "site" in content:
        lines += _site_lines(content["site"], alive=content["alive"])
    if "run" in content:
        lines += _fact_lines(run_facts(content))
    if "delta" in content:
        lines += _delta_lines(content["delta"])
    return lines


def _fact_lines(facts: dict[str, str]) -> list[str]:
    return [f"{name:<12} {text}" for name, text in facts.items()]


def _site_lines(site: dict[str, Any], *, alive: bool | None) -> list[str]:
    from remtta.report.facts import state_of

    streams = site["streams"]
    width = max([len("stream"), *map(len, streams)])
    return [
        f"streams      {state_of(site['exit_reason'], alive)}; {len(streams)} on one model",
        "",
        f"{'stream':<{width}}  frames  skipped  updates  state, source",
        *(
            f"{name:<{width}}  {stream['frames']:6}  {stream['skipped']:7}  {stream['updates']:7}  "
            f"{state_of(stream['exit_reason'], alive)}, {stream['source']}"
            for name, stream in streams.items()
        ),
    ]


def _result_lines(evaluation: dict[str, Any]) -> list[str]:
    results = evaluation["methods"]
    width = max(map(len, evaluation["settings"]["methods"]), default=0)
    head = [f"{'method':<{width}}  mean error  gain   ECE"] if results else []
    return [*head, *(_result_line(f"{name:<{width}}", result) for name, result in results.items())]


def _result_line(name: str, result: dict[str, Any]) -> str:
    gain = "" if result["gain"] is None else f"{result['gain']:+.1f}"
    spread = "" if result["mean_std"] is None else f"  ± {result['mean_std']:.1f} over seeds"
    return f"{name}  {result['mean']:8.1f} %  {gain:>4}  {100 * result['ece']:4.1f}{spread}"


def _delta_lines(delta: dict[str, Any]) -> list[str]:
    layers = delta["layers"]
    width = max([len(layer["layer"]) for layer in layers], default=5)
    return [
        f"delta        {delta['tensors']} tensors, {delta['parameters']} parameters, {delta['bytes']} bytes",
        f"made         {delta['created']} by remtta {delta['remtta_version']}, {delta['method']}, "
        f"{_counts(delta)} from the source weights",
        f"base         {delta['model']}, {delta['base_sha256'][:12]}",
        *_lineage_lines(delta["lineage"]),
        "",
        f"{'layer':<{width}}  rms change  largest change",
        *(f"{layer['layer']:<{width}}  {layer['rms']:10.2e}  {layer['max']:14.2e}" for layer in layers),
        *_class_lines(delta["classes"]),
    ]


def _counts(delta: dict[str, Any]) -> str:
    return f"{counted(delta['updates'], 'update')} on {counted(delta['frames'], 'frame')}"


def _class_lines(classes: list[dict[str, Any]]) -> list[str]:
    moved = ", ".join(f"{each['class']} ({each['bias']:+.2f})" for each in classes)
    return ["", f"centred head, largest changes of the bias: class {moved}"] if moved else []


def _lineage_lines(lineage: dict[str, Any]) -> list[str]:
    """Return lines on the run that made a delta, its source, and its parent deltas."""
    source = [lineage.get("made_by"), lineage.get("source"), lineage.get("kind") and f"({lineage['kind']})"]
    run = f"run {lineage['run'][:12]}" if lineage.get("run") else None
    parents = [
        f"from         {parent['file_sha256'][:12]}, {parent['method']}, {_counts(parent)}"
        f"{', ' + parent['source'] if parent.get('source') else ''}"
        for parent in lineage.get("parents", [])
    ]
    made = ", ".join(filter(None, [" ".join(filter(None, source)), run]))
    return [*([f"lineage      {made}"] if made else []), *parents]


def _comparison_lines(layers: list[dict[str, Any]]) -> list[str]:
    width = max(len(layer["layer"] or "") for layer in layers) + 2
    return [
        f"{'layer':<{width}}  rms first  rms second  distance  cosine",
        *(
            f"{'(all)' if layer['layer'] is None else layer['layer']:<{width}}  {layer['rms'][0]:9.2e}  "
            f"{layer['rms'][1]:10.2e}  {layer['distance']:8.2e}  "
            f"{'-' if layer['cosine'] is None else format(layer['cosine'], '.3f'):>6}"
            for layer in layers
        ),
    ]
