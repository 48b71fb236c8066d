"""`remtta doctor`: check a model's preprocessing before adapting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from remtta.cli.listings import rem_lines
from remtta.cli.running import PrintOptions, RunningOptions, load_torch
from remtta.options import ModelOptions, StreamOptions
from remtta.options.option import Subset
from remtta.runs.reading import aligned, printable

_DOES_NOT_FIT = 3  # exit code
_LIMIT = 100
_IMAGES = "clean images of many classes, or else frames of many conditions"
_Json = Mapping[str, Any]


def doctor(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Image, folder, quoted glob, video, camera index, or address.")
    ],
    model: Annotated[
        ModelOptions,
        Subset(
            *("name", "checkpoint", "use_ema", "num_classes", "model_kwargs"),
            *("mean", "std", "input_size", "interpolation", "crop_pct", "output_name", "provider"),
        ),
    ],
    stream: Annotated[StreamOptions, Subset(limit=_LIMIT)],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("device", "threads", "verbose", "quiet", "debug")],
) -> None:
    """Check whether the preprocessing fits the model, by its predictions on images of SOURCE.

    Tries other means, standard deviations and channel orders, without labels. SOURCE should hold clean images, or
    else frames of many conditions. Exit code 3: something else fits better. Also shows how REM masks the model.

    Examples:

      remtta doctor ./frames --model vit_base_patch16_224

      remtta doctor ./photos --checkpoint vit.safetensors --mean 0.5 --std 0.5 --json | jq .better
    """
    with running.command() as interrupts:
        from remtta.streams.sources import open_stream

        opened = open_stream(source)  # reports a wrong path at once
        load_torch("remtta.evaluation.preprocessing", model)
        from remtta.evaluation.preprocessing import examine

        running.set_threads()
        classifier = running.load_classifier(model)
        report = examine(classifier, opened, limit=stream.limit or _LIMIT, wait=interrupts.check)
        printed.show(report, lambda: "\n".join(map(printable, _lines(report))))
    raise typer.Exit(_DOES_NOT_FIT if report["better"] else 0)


def _lines(report: _Json) -> list[str]:
    model, rem, candidates = report["model"], report["rem"], report["candidates"]
    unreadable = f", {report['unreadable']} cannot be read" if report["unreadable"] else ""
    rows = [["", "  MI, nats", "entropy", "classes"]]
    for number, candidate in enumerate(candidates):
        figures = f"{candidate['information']:.3f}", f"{candidate['entropy']:.3f}", str(candidate["classes"])
        rows.append([f"{'' if number else 'now':<5}{candidate['title']}", *figures])
    return [
        f"model    {model['name']}, {model['num_classes']} classes",
        f"images   {report['images']} of {report['source']}{unreadable}",
        f"now      {options_text(candidates[0])}",
        "",
        *aligned(rows),
        "",
        *_verdict(report, candidates),
        *(
            [f"REM cannot be used: {rem['refused']}"]
            if rem["refused"]
            else rem_lines(rem["masks"], rem["adapts"], rem["weights"])
        ),
    ]


def _verdict(report: _Json, candidates: Sequence[_Json]) -> list[str]:
    better = report["better"]
    if report["fits"] is None:
        return [f"No verdict: the model is too uncertain, or predicts nearly the same for all images. Try {_IMAGES}."]
    if better is None:
        return ["The preprocessing fits: no alternative is significantly better."]
    advantage = f"{better['lead']:.2f} ± {better['standard_error']:.2f} nats of mutual information"
    best = next(candidate for candidate in candidates if candidate["title"] == better["title"])
    options = options_text(best)
    swapped = "Red and blue are swapped in the images or in the checkpoint; no option corrects that."
    return [
        f"This fits better, by {advantage}: {best['title']}",
        *([swapped] if best["red_and_blue_swapped"] else []),
        *([f"try      {options}"] if options != options_text(candidates[0]) else []),
        f"confirm  with {_IMAGES}",
    ]


def options_text(preprocessing: _Json) -> str:
    """Return the command-line options for a preprocessing."""
    mean, std = (" ".join(f"{value:.8g}" for value in preprocessing[name]) for name in ("mean", "std"))
    interpolation, crop_pct = preprocessing["interpolation"], preprocessing["crop_pct"]
    return f"--mean {mean} --std {std} --interpolation {interpolation} --crop-pct {crop_pct:.4g}"
