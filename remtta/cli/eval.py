"""`remtta eval`: labelled domains to error tables."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.groups import Only
from remtta.cli.loading import import_uncollected, load_classifier, model_arguments
from remtta.cli.options.evaluation import (
    DataOptions,
    MethodsOptions,
    ProtocolOptions,
    ResultOptions,
    Root,
    eval_options,
)
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.errors import UsageError
from remtta.methods.settings.names import method_of
from remtta.options import EvalOptions

if TYPE_CHECKING:
    from torch import nn

    from remtta.evaluation.datasets import Dataset
    from remtta.evaluation.protocols import Protocol

_INPUTS = ("input_size", "mean", "std", "interpolation", "crop_pct")
"""Arguments of `load_model` that a protocol fixes where they are not given."""

_Running = Annotated[
    RunningOptions,
    Only(
        *("device", "precision", "compile_model", "threads"),
        *("config", "print_config", "verbose", "quiet", "debug"),
    ),
]

_log = logging.getLogger("remtta")


def evaluate(
    root: Root,
    model: ModelOptions,
    data: DataOptions,
    protocol: ProtocolOptions,
    methods: MethodsOptions,
    results: ResultOptions,
    running: _Running,
) -> None:
    """Measure methods on labelled domains: error per domain, mean, calibration, speed.

    Leaves results.json, tables, predictions.jsonl, and per method a delta and a confusion matrix in the output folder.

    Examples:

      remtta eval imagenetc/ --continual --methods source,tent,rem --protocol rem-paper

      remtta eval photos_c --domains fog,snow --model vit_small_patch16_224 --output table1
    """
    with running.command() as interrupts:
        results.check_resume()
        given, labels = model.given(), model.class_names()
        shared = methods.shared.given(running.precision)
        scenario = protocol.chosen_scenario()
        _check_root(root)
        import_uncollected("remtta.evaluation.runner")
        from remtta.evaluation import TABLE, choose_preprocessing, evaluate
        from remtta.evaluation.plots import draw_plots

        fixed, resize = protocol.fixed(), data.checked_resize()
        batch_size = methods.batch_size(fixed)
        configs = methods.configs(shared, batch_size=batch_size)
        source_data = methods.source.checked(map(method_of, configs))
        running.set_threads(None if results.engine == "serial" else 1)
        start = model.start()
        arguments = model_arguments(given | _fixed_inputs(given, fixed), start)
        options = eval_options(scenario, batch_size, protocol, methods, results)
        selection = data.selection(scenario)
        adapts = any(method_of(name) != "source" for name in configs)
        classifier = _load(root, arguments, labels, running, adapts=adapts)
        dataset = _open(root, classifier, complete=fixed is not None, **selection)
        preprocessing = choose_preprocessing(classifier, dataset, resize="always" if fixed else resize)
        running.compile(classifier)
        folder = results.folder()
        table = evaluate(
            classifier,
            dataset,
            folder,
            methods=configs,
            options=_ordered(options, protocol, dataset),
            preprocessing=preprocessing,
            delta=start,
            source_data=source_data,
            interrupts=interrupts,
        )
        _print_table(table)
        if not running.quiet:
            typer.echo(f"{folder / TABLE}", err=True)
        if results.plots:
            draw_plots(folder, table, classifier, dataset, preprocessing)


def _check_root(root: Path) -> None:
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder")


def _load(
    root: Path, arguments: Mapping[str, Any], labels: list[str] | None, running: RunningOptions, *, adapts: bool
) -> nn.Module:
    """The model; a zero-shot model is told its classes by the data set's folders where nobody else does."""
    from remtta.evaluation.datasets import class_names
    from remtta.models.prompts import is_zero_shot

    if labels is None and is_zero_shot(arguments["name"]) and not arguments.get("labels"):
        labels = class_names(root)
    return load_classifier(arguments, labels, running.device, adapts=adapts, quiet=running.quiet)


def _fixed_inputs(given: Mapping[str, Any], fixed: Protocol | None) -> dict[str, Any]:
    """What a protocol fixes of the input, where nothing is given."""
    return {} if fixed is None else {name: getattr(fixed, name) for name in _INPUTS if given[name] is None}


def _open(root: Path, classifier: nn.Module, **selection: Any) -> Dataset:
    from remtta.evaluation import open_dataset
    from remtta.models.labels import labels_of

    num_classes = int(classifier.num_classes)  # type: ignore[arg-type]
    dataset = open_dataset(root, num_classes=num_classes, labels=labels_of(classifier), **selection)
    _log.info("%s", dataset.report())
    return dataset


def _ordered(options: EvalOptions, protocol: ProtocolOptions, dataset: Dataset) -> EvalOptions:
    """The order on disk, unless another is asked for or that one goes by class."""
    stored = protocol.order is None and not dataset.shuffled
    return dataclasses.replace(options, order="stored") if stored else options


def _print_table(results: Mapping[str, Any]) -> None:
    from remtta.evaluation.tables import notes, plain_table, table_rows

    if not sys.stdout.isatty():
        typer.echo(_encodable(plain_table(results)))
        return
    from rich.console import Console
    from rich.table import Table

    header, rows = table_rows(results)
    num_domains = len(next(iter(results["methods"].values()))["error"])
    table = Table(header[0], *(row[0] for row in rows))
    for place, title in enumerate(header[1:], 1):
        table.add_row(title, *(row[place] for row in rows), end_section=place == num_domains)
    Console().print(table, *notes(results), sep="\n")


def _encodable(text: str) -> str:
    """Signs of a table that standard output has no code for, as on some terminals of Windows, in plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    for sign, plain in {"≈": "~", "±": "+-"}.items():
        if sign.encode(encoding, "ignore") == b"":
            text = text.replace(sign, plain)
    return text
