"""`remtta eval`: from labelled domains to error tables."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.progress import progress
from remtta.cli.running import RunningOptions, load_start, load_torch
from remtta.errors import UsageError, check_installed
from remtta.lab.demo.demo_model import DEMO_MODEL
from remtta.lab.evaluation.options import DataOptions, EvalOptions
from remtta.lab.evaluation.variants import MethodsOptions, MethodVariant
from remtta.lab.tables import TABLE, plain_table
from remtta.options import ModelOptions
from remtta.options.option import Subset, output_folder, output_option, protocol_option
from remtta.runs.folder import RESULTS, check_folder, run_folder

if TYPE_CHECKING:
    from remtta.lab.evaluation.datasets import FoundDataset

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableOptions:
    """Short names of scenarios, and the folder of the results."""

    continual: Annotated[
        bool, protocol_option("Same as --scenario continual: no reset between domains.", common=True)
    ] = False
    episodic: Annotated[bool, protocol_option("Same as --scenario episodic: reset at each domain.", common=True)] = (
        False
    )
    output: Annotated[Path | None, output_folder(more="evaluation.md#results")] = None
    plots: Annotated[bool, output_option("Draw plots.", flags=("--plots/--no-plots",), common=True)] = True

    def scenario(self, options: EvalOptions) -> EvalOptions:
        """Return the options with the scenario of a short flag; raise UsageError if several are given."""
        flags = {"continual": self.continual, "episodic": self.episodic}
        requested = {name for name, is_set in flags.items() if is_set}
        requested |= {options.scenario} - {EvalOptions.scenario}
        if len(requested) > 1:
            raise UsageError(f"choose one scenario, got {', '.join(sorted(requested))}")
        return replace(options, scenario=requested.pop()) if requested else options


def evaluate(
    root: Annotated[
        Path, typer.Argument(metavar="ROOT", help="ImageNet-C-like tree, tree of domains, or folder of CIFAR-C arrays.")
    ],
    data: DataOptions,
    options: EvalOptions,
    model: ModelOptions,
    methods: MethodsOptions,
    table: TableOptions,
    running: Annotated[RunningOptions, Subset("device", "compile_model", "threads", "verbose", "quiet", "debug")],
) -> None:
    """Compare methods on labelled domains: error per domain, mean, calibration, speed.

    Writes to the output folder: results.json, tables, plots, predictions.jsonl, deltas.

    Examples:

      remtta eval imagenetc/ --continual --methods source,tent,rem --protocol rem-paper

      remtta eval photos_c --domains fog,snow --model vit_small_patch16_224 --output table1
    """
    with running.command() as interrupts, ExitStack() as stack:
        options = table.scenario(options)
        _check(root, options, table)
        found = _find(root, data, options)
        output = stack.enter_context(run_folder(table.output))
        check_folder(output, RESULTS, overwrite=options.overwrite, resume=options.resume)
        load_torch("remtta.lab.evaluation.evaluating", model, methods.shared.delta)
        start = load_start(methods.shared.delta, output, overwrite=options.overwrite)
        configs = methods.configs(options.batch_size, model.name or (start.model if start else None))
        from remtta.lab.evaluation.evaluating import evaluate as measure
        from remtta.lab.evaluation.preprocessing import choose_preprocessing
        from remtta.methods.source_data import check_source_data
        from remtta.models.info import labels_of

        check_source_data((MethodVariant.parse(name).method for name in configs), methods.shared.source_data)
        running.set_threads(None if options.engine == "serial" else 1)
        classifier = running.load_classifier(_with_classes(root, _with_protocol(model, options), data), start)
        dataset = found.open(int(classifier.num_classes), labels_of(classifier))  # type: ignore[arg-type]
        _log.info("%s", dataset.report())
        preprocessing = choose_preprocessing(classifier, dataset, resize=data.resize, protocol=options.protocol)
        results = measure(
            classifier,
            dataset,
            output,
            methods=configs,
            options=options,
            preprocessing=preprocessing,
            delta=start,
            source_data=methods.shared.source_data,
            interrupts=interrupts,
            progress=partial(progress, unit="images", hidden=running.quiet),
        )
        typer.echo(plain_table(results, options.columns))
        running.print_message(str(output / TABLE))
        if table.plots:
            from remtta.lab.evaluation.plots import draw_plots

            draw_plots(output, results)


def _check(root: Path, options: EvalOptions, table: TableOptions) -> None:
    """Raise UsageError if there is nothing to evaluate, or to resume, or no Ray."""
    if not root.is_dir():
        why = "not a folder; a list is --labels-file" if root.exists() else "no such folder"
        raise UsageError(f"{root}: {why}")
    if options.resume and table.output is None:
        raise UsageError("--resume continues the evaluation in a folder; name it with --output")
    if options.engine == "ray":
        check_installed("ray", "cluster", "--engine ray")


def _with_protocol(model: ModelOptions, options: EvalOptions) -> ModelOptions:
    """Return the model options with a protocol's input settings, where none are given."""
    from remtta.lab.evaluation.preprocessing import INPUTS

    if options.protocol is None:
        return model
    if model.name == DEMO_MODEL:
        raise UsageError(f"{DEMO_MODEL} takes images of 48 pixels; leave --protocol out")
    inputs = INPUTS[options.protocol]
    return replace(model, **{name: value for name, value in inputs.items() if getattr(model, name) is None})


def _with_classes(root: Path, model: ModelOptions, data: DataOptions) -> ModelOptions:
    """Return the model options; a zero-shot model's classes default to the dataset's folders."""
    from remtta.lab.evaluation.datasets import class_names

    if model.labels or data.labels_file or not model.loader.names_classes(model):
        return model
    return replace(model, labels=class_names(root))


def _find(root: Path, data: DataOptions, options: EvalOptions) -> FoundDataset:
    """Find the domains, before the model is loaded, which takes seconds."""
    from remtta.lab.evaluation.class_maps import read_class_map
    from remtta.lab.evaluation.datasets import find_dataset, read_image_list

    found = find_dataset(
        root,
        domains=data.domains or None,
        severities=data.severities_for(options.scenario),
        image_list=None if data.image_list is None else read_image_list(data.image_list),
        class_map=None if data.class_map is None else read_class_map(data.class_map),
        class_order=data.class_order,
        limit=data.limit,
        complete=options.protocol is not None,
        labels_file=data.labels_file,
    )
    if data.severities and not found.has_severities:
        raise UsageError(f"{root} has no severities; leave --severity out")
    return found
