"""`remtta doctor`: check a model's preprocessing and class order before adapting it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from remtta.cli.classifiers import load_classifier, load_torch
from remtta.cli.models import rem_lines
from remtta.cli.running import PrintOptions, RunningOptions
from remtta.options import DataOptions, ModelOptions, StreamOptions
from remtta.options.option import Only
from remtta.runs.reading import aligned, printable

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
    """Check whether the preprocessing fits the model, by its predictions on images of SOURCE.

    Tries other means and standard deviations, crops, filters and channel orders; with class folders, also compares
    accuracies and checks the class order. Exit code 0: all fits; 3: something else fits better, or the classes are in
    another order. Also shows how REM masks the model.

    Examples:

      remtta doctor ./frames --model vit_base_patch16_224

      remtta doctor ./photos --checkpoint vit.safetensors --mean 0.5 --std 0.5 --json | jq .better
    """
    with running.command() as interrupts:
        from remtta.streams.sources import open_stream

        open_stream(source).close()  # report a wrong path at once
        load_torch("remtta.evaluation.examination", model)
        from remtta.evaluation.class_maps import read_class_map
        from remtta.evaluation.examination import examine
        from remtta.models.card import labels_of

        class_map = None if data.class_map is None else read_class_map(data.class_map)

        running.set_threads()
        classifier = load_classifier(model, running.device)
        limit = stream.limit or _LIMIT
        report = examine(classifier, source, limit=limit, class_map=class_map, wait=interrupts.check)
        printed.show(report, lambda: "\n".join(map(printable, _page(report, labels_of(classifier)))))
    raise typer.Exit(0 if report["fits"] else _DOES_NOT_FIT)


def _page(report: Mapping[str, Any], labels: Sequence[str] | None) -> list[str]:
    model, order, rem = report["model"], report["class_order"], report["rem"]
    now, *_ = candidates = report["candidates"]
    left_out = f", {report['unreadable']} cannot be read" if report["unreadable"] else ""
    return [
        f"model    {model['name']}, {model['num_classes']} classes",
        f"images   {report['images']} of {report['source']}{left_out}",
        f"labels   {'by ' if now['accuracy'] is not None else 'none: '}{report['labels']}",
        f"now      {options_text(now)}",
        "",
        *_table(candidates),
        "",
        *([] if order is None or order["fits"] else [_order_text(order, labels)]),
        *_verdict(report["better"], candidates),
        *(
            [f"REM cannot be used: {rem['refused']}"]
            if rem["refused"]
            else rem_lines(rem["masks"], rem["adapts"], rem["weights"])
        ),
    ]


def _table(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = ["", "  MI, nats", "entropy", "classes", *["accuracy"] * (candidates[0]["accuracy"] is not None)]
    rows = [_row(each, "" if place else "now") for place, each in enumerate(candidates)]
    return aligned([columns, *rows])


def _row(candidate: Mapping[str, Any], mark: str) -> list[str]:
    numbers = [f"{candidate['information']:.3f}", f"{candidate['entropy']:.3f}", str(candidate["classes"])]
    accuracy = [] if candidate["accuracy"] is None else [f"{100 * candidate['accuracy']:.1f} %"]
    return [f"{mark:<5}{candidate['title']}", *numbers, *accuracy]


def _order_text(order: Mapping[str, Any], labels: Sequence[str] | None) -> str:
    names = {folder: labels[number] if labels else number for folder, number in order["mistaken"].items()}
    shown = ", ".join(f"{folder} as {name}" for folder, name in itertools.islice(names.items(), _SHOWN))
    return (
        f"The class order does not match: {100 * order['accuracy']:.0f} % of the images are predicted as their "
        f"folder's class, {100 * order['own']:.0f} % as the class most often predicted for their folder: {shown}"
        f"{', ...' if len(names) > _SHOWN else ''}; see --class-map"
    )


def _verdict(better: Mapping[str, Any] | None, candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    if better is None:
        return ["The preprocessing fits: no alternative is significantly better."]
    by, lead, error = better["by"], better["lead"], better["standard_error"]
    advantage = f"{lead:.2f} ± {error:.2f} nats of mutual information"
    if by == "accuracy":
        advantage = f"{100 * lead:.1f} ± {100 * error:.1f} points of accuracy"
    way = next(each for each in candidates if each["title"] == better["title"])
    swapped = "Red and blue are swapped in the images or in the checkpoint; no option corrects that."
    return [
        f"This fits better, by {advantage}: {way['title']}",
        *([swapped] if way["red_and_blue_swapped"] else []),
        f"try      {options_text(way)}",
    ]


def options_text(way: Mapping[str, Any]) -> str:
    """Return the options for a preprocessing."""
    mean, std = (" ".join(f"{value:.4g}" for value in way[name]) for name in ("mean", "std"))
    return f"--mean {mean} --std {std} --interpolation {way['interpolation']} --crop-pct {way['crop_pct']:.4g}"
