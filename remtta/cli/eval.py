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

    from remtta.deltas.delta import Delta
    from remtta.engines.interrupts import Interrupts
    from remtta.evaluation.domains import Dataset
    from remtta.evaluation.tables import Case, Table
    from remtta.models.preprocessing import Preprocessing

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
    """Several checkpoints, short names of scenarios, and where results go."""

    checkpoints: Annotated[
        Sequence[Path],
        _model(
            "Weights: .safetensors, .pth/.pt/.tar, .npz. Several: an evaluation of each.",
            flags=("--checkpoint",),
            default="timm's own",
            common=True,
            more="evaluation.md#several-checkpoints-and-severities",
        ),
    ] = ()
    continual: Annotated[bool, _protocol("Short for that scenario: reset only at the start.", common=True)] = False
    episodic: Annotated[bool, _protocol("Short for that scenario: reset at each domain.", common=True)] = False
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
    plots: Annotated[bool, _output("Draw pictures.", flags=("--plots/--no-plots",), common=True)] = True

    def scenario(self, options: EvalOptions) -> EvalOptions:
        """Return the options with the scenario of a short flag.

        Raises:
            UsageError: If several scenarios are given.
        """
        flags = {"continual": self.continual, "episodic": self.episodic}
        requested = {name for name, given in flags.items() if given}
        requested |= {options.scenario} - {EvalOptions.scenario}
        if len(requested) > 1:
            raise UsageError(f"choose one scenario, got {', '.join(sorted(requested))}")
        return replace(options, scenario=requested.pop()) if requested else options

    def folder(self, options: EvalOptions) -> AbstractContextManager[Path]:
        """Return a context manager for the folder of the results.

        Raises:
            UsageError: If --resume lacks --output.
        """
        if options.resume and self.output is None:
            raise UsageError("--resume needs the --output of the evaluation to go on with")
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
    """Measure methods on labelled domains: error per domain, mean, calibration, speed.

    Leaves results.json, tables, predictions.jsonl, and per method a delta and a confusion matrix in the output folder.

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
        _load_torch(model, table.checkpoints, methods.shared.delta)
        configs = methods.configs(options.batch_size)
        from remtta.evaluation import TABLE
        from remtta.evaluation.axes import check_folders, folder_of
        from remtta.evaluation.plots import draw_plots
        from remtta.methods.source_data import check_source_data

        check_source_data(map(method_of, configs), methods.shared.source_data)
        running.set_threads(None if options.engine == "serial" else 1)
        checkpoints, severities = table.by_case(), data.by_severity(options.scenario)
        cases = [(*name, *_severity(severity)) for name in checkpoints for severity in severities]
        check_folders(output, cases, may_exist=options.resume or options.overwrite)
        start, fixed = load_start(methods.shared.delta), _with_protocol(model, options)
        tables: dict[Case, Mapping[str, Any]] = {}
        for name, path in checkpoints.items():
            chosen = _with_classes(root, replace(fixed, checkpoint=path), data)
            classifier = load_classifier(chosen, running.device, start=start, quiet=running.quiet)
            datasets = {
                (*name, *_severity(severity)): _open(root, classifier, data, levels, options)
                for severity, levels in severities.items()
            }
            running.compile(classifier)
            for case, dataset in datasets.items():
                folder = folder_of(output, case)
                tables[case] = _measure(classifier, dataset, folder, data, options, methods, start, interrupts)
                _print_table(tables[case], folder / TABLE, quiet=running.quiet)
                if table.plots:
                    draw_plots(
                        folder, tables[case], classifier, dataset, _preprocessing(classifier, dataset, data, options)
                    )
        _print_axes(output, tables, quiet=running.quiet)


def _load_torch(model: ModelOptions, checkpoints: Sequence[Path], delta: Path | None) -> None:
    """Import what comes with torch, once every checkpoint is found to be there."""
    for path in checkpoints:
        replace(model, checkpoint=path).check_files()
    load_torch("remtta.evaluation.evaluating", model, delta)


def _measure(
    classifier: nn.Module,
    dataset: Dataset,
    folder: Path,
    data: DataOptions,
    options: EvalOptions,
    methods: MethodsOptions,
    start: Delta | None,
    interrupts: Interrupts,
) -> dict[str, Any]:
    from remtta.evaluation import evaluate

    return evaluate(
        classifier,
        dataset,
        folder,
        methods=methods.configs(options.batch_size),
        options=options,
        preprocessing=_preprocessing(classifier, dataset, data, options),
        delta=start,
        source_data=methods.shared.source_data,
        interrupts=interrupts,
    )


def _preprocessing(classifier: nn.Module, dataset: Dataset, data: DataOptions, options: EvalOptions) -> Preprocessing:
    from remtta.evaluation import choose_preprocessing

    return choose_preprocessing(classifier, dataset, resize="always" if options.protocol else data.resize)


def _severity(name: str | None) -> Case:
    """Return the axis of a severity that is evaluated separately."""
    return () if name is None else (("severity", name),)


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


def _print_table(results: Mapping[str, Any], place: Path, table: Table | None = None, *, quiet: bool) -> None:
    """Print a table, by default an evaluation's main one, and its path."""
    from remtta.evaluation.tables import plain_table

    typer.echo(_encodable(plain_table(results, table)))
    if not quiet:
        typer.echo(str(place), err=True)


def _print_axes(output: Path, tables: Mapping[Case, Mapping[str, Any]], *, quiet: bool) -> None:
    """Write and print the table of a grid of evaluations, if there are several."""
    from remtta.evaluation.axes import AXES_TABLE, write_axes
    from remtta.evaluation.tables import axes_rows

    if () not in tables:
        write_axes(output, tables)
        _print_table(next(iter(tables.values())), output / AXES_TABLE, axes_rows(tables), quiet=quiet)


def _encodable(text: str) -> str:
    """Replace signs that standard output cannot encode, as on some Windows terminals."""
    encoding = sys.stdout.encoding or "utf-8"
    for sign, plain in {"≈": "~", "±": "+-"}.items():
        if sign.encode(encoding, "ignore") == b"":
            text = text.replace(sign, plain)
    return text
