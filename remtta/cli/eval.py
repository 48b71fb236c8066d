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
from remtta.cli.options.data import Checkpoints, DataOptions, Root
from remtta.cli.options.evaluation import MethodsOptions, ProtocolOptions, ResultOptions, eval_options
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.errors import UsageError
from remtta.methods.settings.names import method_of
from remtta.options import EvalOptions

if TYPE_CHECKING:
    from torch import nn

    from remtta.evaluation.datasets import Dataset
    from remtta.evaluation.protocols import Protocol, Resize
    from remtta.evaluation.tables import Case, Table

_INPUTS = ("input_size", "mean", "std", "interpolation", "crop_pct")
"""Arguments of `load_model` that a protocol fixes where they are not given."""

_Running = Annotated[
    RunningOptions,
    Only(
        *("device", "precision", "compile_model", "threads"),
        *("config", "print_config", "verbose", "quiet", "debug"),
    ),
]

_Model = Annotated[
    ModelOptions,
    Only(
        *("model", "use_ema", "num_classes", "model_kwargs", "labels", "prompts", "text_embeddings", "mean", "std"),
        *("input_size", "interpolation", "crop_pct", "delta"),
    ),
]

_log = logging.getLogger("remtta")


def evaluate(
    root: Root,
    model: _Model,
    checkpoint: Checkpoints,
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

      remtta eval imagenetc/ --severity 1,3,5 --apart --checkpoint a.pth --checkpoint b.pth --output grid1
    """
    with running.command() as interrupts:
        output = results.folder()
        given, labels = model.given(), model.class_names()
        shared = methods.shared.given(running.precision)
        scenario = protocol.chosen_scenario()
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder")
        import_uncollected("remtta.evaluation.runner")
        from remtta.evaluation.axes import folder_of

        fixed = protocol.fixed()
        resize: Resize = "always" if fixed else data.checked_resize()
        batch_size = methods.batch_size(fixed)
        configs = methods.configs(shared, batch_size=batch_size)
        source_data = methods.source.checked(map(method_of, configs))
        running.set_threads(None if results.engine == "serial" else 1)
        start = model.start()
        options = eval_options(scenario, batch_size, protocol, methods, results)
        selection = data.selection() | {"apart": data.apart, "complete": fixed is not None}
        adapts = any(method_of(name) != "source" for name in configs)
        checkpoints, severities = checkpoint.by_case(), data.by_case(scenario)
        results.check_folders(output, [(*name, *severity) for name in checkpoints for severity in severities])
        settings: dict[str, Any] = {"methods": configs, "delta": start, "source_data": source_data}
        settings["interrupts"] = interrupts
        shown = {"plots": results.plots, "quiet": running.quiet}
        tables: dict[Case, Mapping[str, Any]] = {}
        for name, path in checkpoints.items():
            arguments = model_arguments(given | {"checkpoint": path} | _fixed_inputs(given, fixed), start)
            classifier = _load(None if data.labels_file else root, arguments, labels, running, adapts=adapts)
            datasets = {
                (*name, *severity): _open(root, classifier, severities=levels, **selection)
                for severity, levels in severities.items()
            }
            running.compile(classifier)
            for case, dataset in datasets.items():
                settings["options"] = _ordered(options, protocol, dataset)
                tables[case] = _measure(classifier, dataset, folder_of(output, case), resize, settings, **shown)
        _print_axes(output, tables, quiet=running.quiet)


def _measure(
    classifier: nn.Module,
    dataset: Dataset,
    folder: Path,
    resize: Resize,
    settings: Mapping[str, Any],
    *,
    plots: bool,
    quiet: bool,
) -> Mapping[str, Any]:
    """Make an evaluation in a folder, print its table, and draw its pictures."""
    from remtta.evaluation import TABLE, choose_preprocessing, evaluate
    from remtta.evaluation.plots import draw_plots

    preprocessing = choose_preprocessing(classifier, dataset, resize=resize)
    table = evaluate(classifier, dataset, folder, preprocessing=preprocessing, **settings)
    _print_table(table, folder / TABLE, quiet=quiet)
    if plots:
        draw_plots(folder, table, classifier, dataset, preprocessing)
    return table


def _load(
    root: Path | None, arguments: Mapping[str, Any], labels: list[str] | None, running: RunningOptions, *, adapts: bool
) -> nn.Module:
    """The model; a zero-shot model is told its classes by the data set's folders where nobody else does."""
    from remtta.evaluation.datasets import class_names
    from remtta.models.prompts import is_zero_shot

    if labels is None and root is not None and is_zero_shot(arguments["name"]) and not arguments.get("labels"):
        labels = class_names(root)
    return load_classifier(arguments, labels, running.device, adapts=adapts, quiet=running.quiet)


def _fixed_inputs(given: Mapping[str, Any], fixed: Protocol | None) -> dict[str, Any]:
    """What a protocol fixes of the input, where nothing is given."""
    return {} if fixed is None else {name: getattr(fixed, name) for name in _INPUTS if given[name] is None}


def _open(root: Path, classifier: nn.Module, *, apart: bool, **selection: Any) -> Dataset:
    from remtta.evaluation import open_dataset
    from remtta.models.labels import labels_of

    num_classes = int(classifier.num_classes)  # type: ignore[arg-type]
    dataset = open_dataset(root, num_classes=num_classes, labels=labels_of(classifier), **selection)
    if apart and any(domain.severity is None for domain in dataset.domains):
        raise UsageError(f"{root} has domains without severities; leave --apart out")
    _log.info("%s", dataset.report())
    return dataset


def _ordered(options: EvalOptions, protocol: ProtocolOptions, dataset: Dataset) -> EvalOptions:
    """The order on disk, unless another is asked for or that one goes by class."""
    stored = protocol.order is None and not dataset.shuffled
    return dataclasses.replace(options, order="stored") if stored else options


def _print_table(results: Mapping[str, Any], place: Path, table: Table | None = None, *, quiet: bool) -> None:
    """Print a table, by default an evaluation's final one, and tell where it is."""
    from remtta.evaluation.tables import notes, plain_table, table_rows

    if not sys.stdout.isatty():
        typer.echo(_encodable(plain_table(results, table)))
    else:
        from rich.console import Console
        from rich.table import Table as RichTable

        header, rows = table or table_rows(results)
        num_domains = len(next(iter(results["methods"].values()))["error"])
        shown = RichTable(header[0], *(row[0] for row in rows))
        for position, title in enumerate(header[1:], 1):
            shown.add_row(title, *(row[position] for row in rows), end_section=position == num_domains)
        Console().print(shown, *notes(results, table), sep="\n")
    if not quiet:
        typer.echo(str(place), err=True)


def _print_axes(output: Path, tables: Mapping[Case, Mapping[str, Any]], *, quiet: bool) -> None:
    """Write and print the table of several evaluations, if there are."""
    from remtta.evaluation.axes import AXES_TABLE, write_axes
    from remtta.evaluation.tables import axes_rows

    if () not in tables:
        write_axes(output, tables)
        _print_table(next(iter(tables.values())), output / AXES_TABLE, axes_rows(tables), quiet=quiet)


def _encodable(text: str) -> str:
    """Signs of a table that standard output has no code for, as on some terminals of Windows, in plain ones."""
    encoding = sys.stdout.encoding or "utf-8"
    for sign, plain in {"≈": "~", "±": "+-"}.items():
        if sign.encode(encoding, "ignore") == b"":
            text = text.replace(sign, plain)
    return text
