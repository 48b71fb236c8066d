"""`remtta doctor`: whether a model's preprocessing and classes fit, before anything is adapted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.loading import load_classifier
from remtta.cli.models import rem_lines
from remtta.cli.running import PrintOptions, RunningOptions
from remtta.options import DataOptions, ModelOptions, StreamOptions
from remtta.options.option import Only
from remtta.runs.reading import printable

if TYPE_CHECKING:
    from remtta.evaluation.examination import Better, ClassOrder, Finding, Report
    from remtta.models.preprocessing import Preprocessing

_DOES_NOT_FIT = 3
_LIMIT = 100
_SHOWN = 4


def doctor(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Image, folder, quoted glob, video, camera index, or address.")
    ],
    model: Annotated[
        ModelOptions,
        Only(
            *("name", "checkpoint", "use_ema", "num_classes", "model_kwargs", "labels"),
            *("mean", "std", "input_size", "interpolation", "crop_pct"),
        ),
    ],
    stream: Annotated[StreamOptions, Only(limit=_LIMIT)],
    data: Annotated[DataOptions, Only("class_map")],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Only("device", "threads", "verbose", "quiet", "debug")],
) -> None:
    """Tell whether the preprocessing fits the model, by what it says of images of SOURCE; and what REM finds in it.

    Other means and deviations, crops, filters and orders of channels are tried; class folders give accuracies. Exit
    code 0: it fits; 3: something else fits better, or the classes are in another order.

    Examples:

      remtta doctor ./frames --model vit_base_patch16_224

      remtta doctor ./photos --checkpoint vit.safetensors --mean 0.5 --std 0.5 --json | jq .better
    """
    with running.command() as interrupts:
        from remtta.evaluation.class_maps import read_class_map
        from remtta.evaluation.examination import examine

        class_map = None if data.class_map is None else read_class_map(data.class_map)

        running.set_threads()
        classifier = load_classifier(model, running.device, adapts=False)
        limit = stream.limit or _LIMIT
        report = examine(classifier, source, limit=limit, class_map=class_map, wait=interrupts.check)
        if printed.as_json:
            typer.echo(json.dumps(report.as_dict(), indent=2))
        else:
            typer.echo("\n".join(map(printable, _page(report))))
    raise typer.Exit(0 if report.fits else _DOES_NOT_FIT)


def _page(report: Report) -> list[str]:
    card, refused = report.card, report.support.refused.get("rem")
    left_out = f", {report.unreadable} cannot be read" if report.unreadable else ""
    order = report.class_order
    return [
        f"model    {card.name}, {card.num_classes} classes",
        f"images   {report.num_images} of {report.source}{left_out}",
        f"classes  {'by ' if report.findings[0].accuracy is not None else 'not known: '}{report.labels}",
        f"now      {options_text(card.preprocessing)}",
        "",
        *_table(report.findings),
        "",
        *([] if order is None or order.fits else [_order_text(order, card.labels)]),
        *_verdict(report.better),
        *([f"REM cannot be had: {refused}"] if refused else rem_lines(report.support)),
    ]


def _table(findings: Sequence[Finding]) -> list[str]:
    width = max(len(finding.candidate.title) for finding in findings)
    labelled = findings[0].accuracy is not None
    head = f"{'':<{width + 5}}  told apart  entropy  classes{'  accuracy' if labelled else ''}"
    return [head, *(_row(finding, "" if place else "now", width) for place, finding in enumerate(findings))]


def _row(finding: Finding, mark: str, width: int) -> str:
    accuracy = "" if finding.accuracy is None else f"  {100 * finding.accuracy:6.1f} %"
    return (
        f"{mark:<5}{finding.candidate.title:<{width}}  {finding.information:10.3f}  {finding.entropy:7.3f}  "
        f"{finding.classes:7d}{accuracy}"
    )


def _order_text(order: ClassOrder, labels: Sequence[str] | None) -> str:
    names = {folder: labels[number] if labels else number for folder, number in order.mistaken.items()}
    shown = ", ".join(f"{folder} for {name}" for folder, name in itertools.islice(names.items(), _SHOWN))
    return (
        f"The classes are in another order: {100 * order.accuracy:.0f} % are predicted as their folder's, "
        f"{100 * order.own:.0f} % as one half of a folder says of the other. Taken are {shown}"
        f"{', ...' if len(names) > _SHOWN else ''}; see --class-map"
    )


def _verdict(better: Better | None) -> list[str]:
    if better is None:
        return ["The preprocessing fits: nothing tried is better by more than chance."]
    lead = f"{100 * better.lead:.1f} ± {100 * better.standard_error:.1f} points of accuracy"
    if better.by == "information":
        lead = f"{better.lead:.2f} ± {better.standard_error:.2f} nats told apart"
    way = better.finding.candidate
    return [
        f"Fits better, by {lead}: {way.title}",
        *(["Red and blue are swapped in the images or in the checkpoint; no option undoes it."] if way.swapped else []),
        f"try      {options_text(way.preprocessing)}",
    ]


def options_text(way: Preprocessing) -> str:
    """The options that ask for a preprocessing."""
    mean, std = (" ".join(f"{value:.4g}" for value in values) for values in (way.mean, way.std))
    return f"--mean {mean} --std {std} --interpolation {way.interpolation} --crop-pct {way.crop_pct:.4g}"
