"""`remtta doctor`: check a model's preprocessing before adapting it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.listings import rem_lines
from remtta.cli.progress import progress
from remtta.cli.running import PrintOptions, RunningOptions, load_torch
from remtta.errors import check
from remtta.methods.settings.chosen import default_method
from remtta.methods.table import METHOD_SUMMARIES
from remtta.options import ModelOptions, StreamOptions
from remtta.options.option import Subset
from remtta.runs.reading import aligned, printable

if TYPE_CHECKING:
    from remtta.lab.doctor import Diagnosis

_DOES_NOT_FIT = 3  # exit code
_LIMIT = 100
_IMAGES = "clean images of many classes, or else frames of many conditions"


def doctor(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Image, folder, quoted glob, video, camera index, or address.")
    ],
    model: Annotated[
        ModelOptions,
        Subset(
            *("name", "checkpoint", "use_ema", "num_classes", "model_kwargs"),
            *("mean", "std", "input_size", "interpolation", "crop_pct", "own"),
        ),
    ],
    stream: Annotated[StreamOptions, Subset(limit=_LIMIT)],
    printed: PrintOptions,
    running: Annotated[RunningOptions, Subset("device", "threads", "verbose", "quiet", "debug")],
) -> None:
    """Check whether the preprocessing fits the model, by its predictions on images of SOURCE.

    Tries other means, standard deviations and channel orders, without labels. SOURCE should hold clean images, or
    else frames of many conditions. Exit code 3: something else fits better. Also shows how REM masks the model.
    For a file of remtta export --adaptive, checks instead that it adapts itself as it should (3: it does not).

    Examples:

      remtta doctor ./frames --model vit_base_patch16_224

      remtta doctor ./photos --checkpoint vit.safetensors --mean 0.5 --std 0.5 --json | jq .better
    """
    with running.command() as interrupts:
        from remtta.streams.sources import open_stream

        opened = open_stream(source)  # reports a wrong path at once
        load_torch("remtta.lab.doctor", model)
        from remtta.adapt.image_inputs import warn_of_guess
        from remtta.lab.doctor import MIN_IMAGES, examine, read_images
        from remtta.models.info import model_info

        limit = stream.limit or _LIMIT
        check(limit >= MIN_IMAGES, "--limit", limit, f"at least {MIN_IMAGES}")
        running.set_threads()
        classifier: Any = running.load_classifier(model, to_check=True)
        if hasattr(classifier, "diagnose"):  # it adapts itself
            images, num_unreadable = read_images(opened, limit, model_info(classifier).preprocessing, interrupts.check)
            checks = classifier.diagnose(images, interrupts.check)
            failed = [name for name, value in checks.items() if value is False]
            facts = {"model": model.name, "source": opened.name, "images": len(images), "unreadable": num_unreadable}
            content = {"works": not failed, **facts, **checks}
            printed.show(content, lambda: "\n".join(_check_lines({**facts, **checks}, failed)))
            raise typer.Exit(_DOES_NOT_FIT if failed else 0)
        began = time.monotonic()
        with progress("predicting", "predictions", hidden=running.quiet, rate_unit="predictions") as show:
            found = examine(
                classifier,
                opened,
                limit=limit,
                wait=interrupts.check,
                on_batch=lambda done, total: show(done, total, "", done / max(1e-9, time.monotonic() - began)),
            )
        warn_of_guess(found.info.guessed)
        printed.show(found.as_dict(), lambda: "\n".join(map(printable, _lines(found))))
    raise typer.Exit(_DOES_NOT_FIT if found.better else 0)


def _check_lines(found: Mapping[str, object], failed: Sequence[str]) -> list[str]:
    shown = {True: "yes", False: "no"}
    rows = [
        [
            name.replace("_", " "),
            shown[value] if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else str(value),
        ]
        for name, value in found.items()
    ]
    if "predicts_as_fast" not in found:
        rows.append(["predicts as fast", "not checked"])
    names = " and ".join(name.replace("_", " ") for name in failed)
    verdict = f"It does not do what it should: {names}. Export it again." if failed else "It does what it should."
    verdict += " Its preprocessing was not checked: run doctor on the original model."
    return [*aligned(rows, left=(0, 1)), "", verdict]


def _lines(found: Diagnosis) -> list[str]:
    info, support, configured = found.info, found.support, found.findings[0].candidate.preprocessing
    unreadable = f", {found.num_unreadable} cannot be read" if found.num_unreadable else ""
    rows = [["", "  MI, nats", "entropy", "classes"]]
    for number, finding in enumerate(found.findings):
        figures = f"{finding.information:.3f}", f"{finding.uncertainty:.3f}", str(finding.num_classes)
        rows.append([f"{'' if number else 'now':<5}{finding.candidate.title}", *figures])
    refused, default = support.refused.get("rem"), default_method(info.name)
    return [
        f"model    {info.name}, {info.num_classes} classes",
        f"images   {found.num_images} of {found.source}{unreadable}",
        f"now      {configured.command_line}",
        "",
        *aligned(rows),
        "",
        *_verdict(found),
        *(
            rem_lines(support.masks, support.adapts, support.num_adapted)
            if refused is None
            else [f"REM cannot be used: {refused}"]
            if default in support.refused
            else [f"method   {default}: {METHOD_SUMMARIES[default]}"]
        ),
    ]


def _verdict(found: Diagnosis) -> list[str]:
    if found.fits is None:
        return [f"No verdict: the model is too uncertain, or predicts nearly the same for all images. Try {_IMAGES}."]
    if found.better is None:
        return ["The preprocessing fits: no alternative is significantly better."]
    best = found.better.finding.candidate
    options, configured = best.preprocessing.command_line, found.findings[0].candidate.preprocessing.command_line
    swapped = "Red and blue are swapped in the images or in the checkpoint; no option corrects that."
    return [
        f"This fits better, by {found.better.lead:.2f} ± {found.better.standard_error:.2f} nats of mutual information: "
        f"{best.title}",
        *([swapped] if best.swapped else []),
        *([f"try      {options}"] if options != configured else []),
        f"confirm  with {_IMAGES}",
    ]
