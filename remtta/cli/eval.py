"""`remtta eval`: from labelled domains to error tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.classifiers import load_classifier, load_start, load_torch
from remtta.cli.running import RunningOptions
from remtta.errors import UsageError
from remtta.methods.settings.chosen import MethodsOptions
from remtta.methods.settings.names import method_of
from remtta.options import DEFAULT_MODEL, DataOptions, EvalOptions, ModelOptions
from remtta.options.option import Only, Option
from remtta.runs.folder import run_folder

if TYPE_CHECKING:
    from torch import nn

    from remtta.evaluation.domains import Dataset
    from remtta.evaluation.tables import Case, Table

_model = partial(Option, panel="Model")
_output = partial(Option, panel="Output and running")
_protocol = partial(Option, panel="Protocol")

_Model = Annotated[
    ModelOptions,
    Only(
        *("name", "use_ema", "num_classes", "model_kwargs", "labels", "prompts", "text_embeddings", "mean", "std"),
        *("input_size", "interpolation", "crop_pct"),
    ),
]
_Running = Annotated[
    RunningOptions, Only("device", "compile_model", "threads", "config", "print_config", "verbose", "quiet", "debug")
]

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class TableOptions:
    """Several checkpoints, short names of scenarios, and the folder of the results."""

    checkpoints: Annotated[
        Sequence[Path],
        _model(
            "Weights: .safetensors, .pth/.pt/.tar or .npz; if repeated, each is evaluated.",
            flags=("--checkpoint",),
            default="timm's own",
            common=True,
            more="evaluation.md#several-checkpoints-and-severities",
        ),
    ] = ()
    continual: Annotated[bool, _protocol("Same as --scenario continual: no reset between domains.", common=True)] = (
        False
    )
    episodic: Annotated[bool, _protocol("Same as --scenario episodic: reset at each domain.", common=True)] = False
    output: Annotated[
        Path | None,
        _output(
            "Folder for the results.",
            flags=("--output", "-o"),
            metavar="DIR",
            default="runs/<UTC time>",
            common=True,
            more="evaluation.md#results",
        ),
    ] = None
    plots: Annotated[bool, _output("Draw plots.", flags=("--plots/--no-plots",), common=True)] = True

    def scenario(self, options: EvalOptions) -> EvalOptions:
        """Return the options with the scenario of a short flag; raise UsageError if several are given."""
        flags = {"continual": self.continual, "episodic": self.episodic}
        requested = {name for name, given in flags.items() if given}
        requested |= {options.scenario} - {EvalOptions.scenario}
        if len(requested) > 1:
            raise UsageError(f"choose one scenario, got {', '.join(sorted(requested))}")
        return replace(options, scenario=requested.pop()) if requested else options

    def folder(self, options: EvalOptions) -> AbstractContextManager[Path]:
        """Return a context manager for the folder of the results; raise UsageError if --resume lacks --output."""
        if options.resume and self.output is None:
            raise UsageError("--resume continues the evaluation in a folder; name it with --output")
        return run_folder(self.output)

    def by_case(self) -> dict[Case, Path | None]:
        """Return each checkpoint by its case in the grid; the case is empty for a single one.

        Raises:
            UsageError: If one of several does not exist, or is named twice.
        """
        from remtta.evaluation.axes import checkpoint_names

        if len(self.checkpoints) < 2:
            return {(): self.checkpoints[0] if self.checkpoints else None}
        names = checkpoint_names(self.checkpoints)
        return {(("checkpoint", name),): path for name, path in zip(names, self.checkpoints, strict=True)}


def evaluate(
    root: Annotated[
        Path, typer.Argument(metavar="ROOT", help="ImageNet-C-like tree, tree of domains, or folder of CIFAR-C arrays.")
    ],
    data: DataOptions,
    options: EvalOptions,
    model: _Model,
    methods: MethodsOptions,
    table: TableOptions,
    running: _Running,
) -> None:
    """Compare methods on labelled domains: error per domain, mean, calibration, speed.

    Writes to the output folder: results.json, tables, plots, predictions.jsonl, deltas, confusion matrices.

    Examples:

      remtta eval imagenetc/ --continual --methods source,tent,rem --protocol rem-paper

      remtta eval photos_c --domains fog,snow --model vit_small_patch16_224 --output table1

      remtta eval imagenetc/ --severity 1,3,5 --apart --checkpoint a.pth --checkpoint b.pth --output grid1
    """
    with running.command() as interrupts, ExitStack() as during:
        options = table.scenario(options)
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder")
        output = during.enter_context(table.folder(options))
        for checkpoint in table.checkpoints:
            replace(model, checkpoint=checkpoint).check_files()
        load_torch("remtta.evaluation.evaluating", model, methods.shared.delta)
        configs = methods.configs(options.batch_size)
        from remtta.evaluation.axes import check_folders, folder_of
        from remtta.methods.source_data import check_source_data

        check_source_data(map(method_of, configs), methods.shared.source_data)
        running.set_threads(None if options.engine == "serial" else 1)
        checkpoints, severities = table.by_case(), data.by_severity(options.scenario)
        cases = [(*name, *severity) for name in checkpoints for severity in severities]
        check_folders(output, cases, overwrite=options.overwrite, resume=options.resume)
        start = load_start(methods.shared.delta)
        source_data = methods.shared.source_data
        how = {"methods": configs, "delta": start, "source_data": source_data, "interrupts": interrupts}
        tables: dict[Case, Mapping[str, Any]] = {}
        for name, path in checkpoints.items():
            chosen = _with_classes(root, replace(_with_protocol(model, options), checkpoint=path), data)
            classifier = load_classifier(chosen, running.device, start=start, quiet=running.quiet)
            datasets = {
                (*name, *severity): _open(root, classifier, data, levels, options)
                for severity, levels in severities.items()
            }
            running.compile(classifier)
            for case, dataset in datasets.items():
                folder = folder_of(output, case)
                tables[case] = _measure(classifier, dataset, folder, data, options, table, running, how)
        _print_axes(output, tables, running)


def _measure(
    classifier: nn.Module,
    dataset: Dataset,
    folder: Path,
    data: DataOptions,
    options: EvalOptions,
    table: TableOptions,
    running: RunningOptions,
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Evaluate, print the table, draw the pictures, and return the results."""
    from remtta.evaluation import TABLE, choose_preprocessing, evaluate

    preprocessing = choose_preprocessing(classifier, dataset, resize="always" if options.protocol else data.resize)
    results = evaluate(classifier, dataset, folder, options=options, preprocessing=preprocessing, **how)
    _print_table(results, folder / TABLE, running)
    if table.plots:
        from remtta.evaluation.plots import draw_plots

        draw_plots(folder, results, classifier, dataset, preprocessing)
    return results


def _with_protocol(model: ModelOptions, options: EvalOptions) -> ModelOptions:
    """Return the model options with a protocol's input settings, where none are given."""
    from remtta.evaluation.protocols import INPUTS

    if options.protocol is None:
        return model
    fixed = INPUTS[options.protocol]
    return replace(model, **{name: value for name, value in fixed.items() if getattr(model, name) is None})


def _with_classes(root: Path, model: ModelOptions, data: DataOptions) -> ModelOptions:
    """Return the model options; a zero-shot model gets its classes from the dataset's folders unless given
    otherwise.
    """
    from remtta.evaluation.datasets import class_names
    from remtta.models.prompts import is_zero_shot

    if model.labels or data.labels_file or not is_zero_shot(model.name or DEFAULT_MODEL):
        return model
    return replace(model, labels=class_names(root))


def _open(
    root: Path, classifier: nn.Module, data: DataOptions, severities: Sequence[int] | None, options: EvalOptions
) -> Dataset:
    from remtta.evaluation import open_dataset
    from remtta.evaluation.class_maps import read_class_map
    from remtta.evaluation.datasets import read_image_list
    from remtta.models.card import labels_of

    dataset = open_dataset(
        root,
        num_classes=int(classifier.num_classes),  # type: ignore[arg-type]
        labels=labels_of(classifier),
        domains=data.domains or None,
        severities=severities,
        image_list=None if data.image_list is None else read_image_list(data.image_list),
        class_map=None if data.class_map is None else read_class_map(data.class_map),
        limit=data.limit,
        complete=options.protocol is not None,
        labels_file=data.labels_file,
    )
    if data.apart and any(domain.severity is None for domain in dataset.domains):
        raise UsageError(f"{root} has domains without severities; leave --apart out")
    _log.info("%s", dataset.report())
    return dataset


def _print_table(results: Mapping[str, Any], place: Path, running: RunningOptions, table: Table | None = None) -> None:
    """Print a table, by default an evaluation's main one, and its path."""
    from remtta.evaluation.tables import plain_table

    typer.echo(_encodable(plain_table(results, table)))
    running.tell(str(place))


def _print_axes(output: Path, tables: Mapping[Case, Mapping[str, Any]], running: RunningOptions) -> None:
    """Write and print the table of a grid of evaluations, if there are several."""
    from remtta.evaluation.axes import AXES_TABLE, write_axes
    from remtta.evaluation.tables import axes_rows

    if () not in tables:
        write_axes(output, tables)
        _print_table(next(iter(tables.values())), output / AXES_TABLE, running, axes_rows(tables))


def _encodable(text: str) -> str:
    """Replace signs that standard output cannot encode, as on some Windows terminals."""
    encoding = sys.stdout.encoding or "utf-8"
    for sign, plain in {"≈": "~", "±": "+-"}.items():
        if sign.encode(encoding, "ignore") == b"":
            text = text.replace(sign, plain)
    return text
