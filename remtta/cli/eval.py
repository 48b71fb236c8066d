"""`remtta eval`: labelled domains to error tables."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from remtta.cli import options as opt
from remtta.cli.loading import model_arguments
from remtta.cli.reporting import command, refused_values
from remtta.errors import UsageError
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, method_config
from remtta.methods.settings.names import check_method_names, label_of, method_of
from remtta.options import DEFAULT_BATCH_SIZE, SCENARIOS, EvalOptions
from remtta.runs.folder import default_folder

if TYPE_CHECKING:
    from torch import nn

    from remtta.evaluation.datasets import Dataset

_DATA = "Data"
_PROTOCOL = "Protocol"
_OUTPUT = "Output"
_ALL_SEVERITIES = "1,2,3,4,5"

_log = logging.getLogger("remtta")


def evaluate(
    root: Annotated[Path, typer.Argument(help="ImageNet-C-like tree, tree of domains, or folder of CIFAR-C arrays.")],
    model: opt.Model = None,
    checkpoint: opt.Checkpoint = None,
    use_ema: opt.UseEma = False,
    num_classes: opt.NumClasses = None,
    model_kwargs: opt.ModelKwargs = None,
    labels: opt.Labels = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    input_size: opt.InputSize = None,
    interpolation: opt.Interpolation = None,
    crop_pct: opt.CropPct = None,
    delta: opt.StartDelta = None,
    domains: Annotated[
        str | None, typer.Option(help="Which ones, in this order. Default: the standard order.", rich_help_panel=_DATA)
    ] = None,
    severity: Annotated[
        str | None, typer.Option(help="One or several of 1 to 5. Default: 5; gradual has all.", rich_help_panel=_DATA)
    ] = None,
    image_list: Annotated[
        Path | None, typer.Option(help="Only these images, in this order: wnid/name per line.", rich_help_panel=_DATA)
    ] = None,
    class_map: Annotated[
        Path | None, typer.Option(help="Class folder and class number per line, or JSON.", rich_help_panel=_DATA)
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many images per domain.", rich_help_panel=_DATA)
    ] = None,
    resize: Annotated[
        str,
        typer.Option(help="auto (not if images have the input size already), always or never.", rich_help_panel=_DATA),
    ] = "auto",
    protocol: Annotated[
        str | None, typer.Option(help="rem-paper or rem-paper-cifar: the paper's settings.", rich_help_panel=_PROTOCOL)
    ] = None,
    scenario: Annotated[
        str | None, typer.Option(help=f"{', '.join(SCENARIOS)}. Default: continual.", rich_help_panel=_PROTOCOL)
    ] = None,
    continual: Annotated[
        bool, typer.Option("--continual", help="Reset only at the start.", rich_help_panel=_PROTOCOL)
    ] = False,
    episodic: Annotated[
        bool, typer.Option("--episodic", help="Reset at each domain.", rich_help_panel=_PROTOCOL)
    ] = False,
    imbalance: Annotated[
        float, typer.Option(help="Label shift: imbalance ratio, 1 to inf.", rich_help_panel=_PROTOCOL)
    ] = float("inf"),
    dirichlet: Annotated[
        float | None, typer.Option(help="Label shift: Dirichlet concentration instead.", rich_help_panel=_PROTOCOL)
    ] = None,
    cost_ratio: Annotated[
        float | None,
        typer.Option(help="Time-constrained: update over forward pass; else measured.", rich_help_panel=_PROTOCOL),
    ] = None,
    unseen: Annotated[
        str | None, typer.Option(help="Domains to test at the end, without learning.", rich_help_panel=_PROTOCOL)
    ] = None,
    revisit: Annotated[
        bool, typer.Option("--revisit", help="Test all domains again at the end.", rich_help_panel=_PROTOCOL)
    ] = False,
    order: Annotated[
        str | None,
        typer.Option(help="shuffled or stored. Default: stored for arrays and image lists.", rich_help_panel=_PROTOCOL),
    ] = None,
    seeds: Annotated[
        str, typer.Option("--seeds", "--seed", help="One run each: 0,1,2.", rich_help_panel=_PROTOCOL)
    ] = "0",
    methods: Annotated[
        str,
        typer.Option(
            help=f"Of {', '.join(METHOD_CONFIGS)}. rem+guard: under the guard. LABEL=rem: one more row, "
            "for --set LABEL.KEY=VALUE.",
            rich_help_panel="Method",
        ),
    ] = "source,rem",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="METHOD.KEY=VALUE",
            help="One method's (or label's) setting: tent.lr=1e-4.",
            rich_help_panel="Method",
        ),
    ] = None,
    mask_ratios: opt.MaskRatios = None,
    ranking_weight: opt.RankingWeight = None,
    margin: opt.Margin = None,
    lr: opt.LearningRate = None,
    optimizer: opt.Optimizer = None,
    momentum: opt.Momentum = None,
    steps: opt.Steps = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            "--batch-size",
            "-b",
            min=1,
            help=f"Images per update. Default: {DEFAULT_BATCH_SIZE}.",
            rich_help_panel="Method",
        ),
    ] = None,
    micro_batch: opt.MicroBatch = None,
    adapt_layers: opt.AdaptLayers = None,
    reset_every: Annotated[
        int | None,
        typer.Option(min=1, help="Back to the source weights after this many images.", rich_help_panel="Method"),
    ] = None,
    source_data: opt.SourceData = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for results. Default: runs/<UTC time>.", rich_help_panel=_OUTPUT),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier evaluation.", rich_help_panel=_OUTPUT)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with the evaluation in --output, if there is one.", rich_help_panel=_OUTPUT
        ),
    ] = False,
    plots: Annotated[
        bool, typer.Option("--plots/--no-plots", help="Draw pictures, with matplotlib.", rich_help_panel=_OUTPUT)
    ] = True,
    on_error: Annotated[
        opt.OnError, typer.Option(help="At an image that cannot be read.", rich_help_panel=_OUTPUT)
    ] = opt.OnError.STOP,
    device: opt.Device = "auto",
    precision: opt.Precision = opt.Precisions.AUTO,
    compile_model: opt.Compile = False,
    threads: opt.Threads = None,
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure methods on labelled domains: error per domain, mean, calibration, speed.

    Leaves results.json, table.md, predictions.jsonl and a delta per method in the output folder.

    Examples:

      remtta eval imagenetc/ --continual --methods source,tent,rem --protocol rem-paper

      remtta eval photos_c --domains fog,snow --model vit_small_patch16_224 --output table1
    """
    with command(verbose=verbose, quiet=quiet, debug=debug) as interrupts:
        if resume and output is None:
            raise UsageError("--resume needs the --output of the evaluation to go on with")
        kwargs = opt.parse_pairs(model_kwargs)
        label_names = opt.read_labels(labels)
        shared = opt.method_settings(
            mask_ratios=mask_ratios,
            ranking_weight=ranking_weight,
            margin=margin,
            lr=lr,
            optimizer=optimizer,
            momentum=momentum,
            steps=steps,
            micro_batch=micro_batch,
            adapt_layers=adapt_layers,
            precision=precision,
        )
        chosen_scenario = _scenario(scenario, continual=continual, episodic=episodic)
        if not root.is_dir():
            raise UsageError(f"{root}: no such folder")

        import torch

        from remtta.backbones.registry import check_adaptable, compile_blocks
        from remtta.deltas.delta import load_delta
        from remtta.evaluation import TABLE, choose_preprocessing, evaluate, open_dataset
        from remtta.evaluation.classes import read_class_map
        from remtta.evaluation.datasets import read_image_list
        from remtta.evaluation.plots import draw_plots
        from remtta.evaluation.protocols import PROTOCOLS, Resize
        from remtta.methods.source_data import check_source_data
        from remtta.models.labels import labels_of
        from remtta.models.loading import load_model

        if protocol is not None and protocol not in PROTOCOLS:
            raise UsageError(f'unknown protocol "{protocol}"; choose {" or ".join(PROTOCOLS)}')
        if resize not in get_args(Resize):
            raise UsageError(f"--resize takes {', '.join(get_args(Resize))}, got {resize}")
        fixed = None if protocol is None else PROTOCOLS[protocol]
        size = batch_size
        if size is None:
            size = fixed.batch_size if fixed else DEFAULT_BATCH_SIZE
        configs = _method_configs(_names(methods), shared, settings or [], batch_size=size)
        check_source_data(map(method_of, configs), source_data)
        if threads:
            torch.set_num_threads(threads)
        start = None if delta is None else load_delta(delta)
        inputs = {
            "input_size": input_size,
            "mean": mean,
            "std": std,
            "interpolation": interpolation,
            "crop_pct": crop_pct,
        }
        if fixed:
            inputs = {name: getattr(fixed, name) if value is None else value for name, value in inputs.items()}
        arguments = model_arguments(
            {
                "name": model,
                "checkpoint": checkpoint,
                "use_ema": use_ema,
                "num_classes": num_classes,
                "model_kwargs": kwargs,
                **inputs,
            },
            start,
        )
        with refused_values():
            options = EvalOptions(
                scenario=chosen_scenario,
                batch_size=size,
                seeds=_numbers("--seeds", seeds),
                order="shuffled" if order is None else order,  # type: ignore[arg-type]
                unseen=tuple(_names(unseen)),
                revisit=revisit,
                imbalance=imbalance,
                dirichlet=dirichlet,
                cost_ratio=cost_ratio,
                reset_every=reset_every,
                on_error=on_error.value,
                overwrite=overwrite,
                resume=resume,
                protocol=protocol,
            )
        if chosen_scenario == "gradual" and severity is not None:
            raise UsageError("the gradual scenario visits all severities; leave --severity out")
        severities = _numbers("--severity", _ALL_SEVERITIES if chosen_scenario == "gradual" else severity or "5")
        if not set(severities) <= set(range(1, 6)):
            raise UsageError(f"--severity takes numbers from 1 to 5, got {severity}")
        image_names = None if image_list is None else read_image_list(image_list)
        mapped = None if class_map is None else read_class_map(class_map)
        if {*map(method_of, configs)} != {"source"}:
            check_adaptable(arguments["name"], arguments.get("model_kwargs"))
        classifier = load_model(**arguments, labels=label_names, device=device)
        dataset = _open(
            open_dataset(
                root,
                num_classes=_num_classes(classifier),
                labels=labels_of(classifier),
                domains=_names(domains) or None,
                complete=fixed is not None,
                severities=severities,
                image_list=image_names,
                class_map=mapped,
                limit=limit,
            )
        )
        if order is None and not dataset.shuffled:
            options = dataclasses.replace(options, order="stored")
        chosen = choose_preprocessing(classifier, dataset, resize="always" if fixed else resize)  # type: ignore[arg-type]
        if compile_model:
            compile_blocks(classifier)
        folder = output or default_folder()
        results = evaluate(
            classifier,
            dataset,
            folder,
            methods=configs,
            options=options,
            preprocessing=chosen,
            delta=start,
            source_data=source_data,
            interrupts=interrupts,
        )
        _print_table(results)
        if not quiet:
            typer.echo(f"{folder / TABLE}", err=True)
        if plots:
            draw_plots(folder, results, classifier, dataset, chosen)


def _open(dataset: Dataset) -> Dataset:
    _log.info("%s", dataset.report())
    return dataset


def _num_classes(model: nn.Module) -> int:
    return int(model.num_classes)  # type: ignore[arg-type]


def _scenario(named: str | None, *, continual: bool, episodic: bool) -> str:
    asked = {name for name, given in (("continual", continual), ("episodic", episodic)) if given}
    asked |= {named} if named else set()
    if len(asked) > 1:
        raise UsageError(f"choose one scenario, got {', '.join(sorted(asked))}")
    return asked.pop() if asked else "continual"


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UsageError(f"{option} takes whole numbers such as 1,2,3, got {text}") from None


def _method_configs(
    names: Sequence[str], shared: dict[str, Any], single: Sequence[str], *, batch_size: int
) -> dict[str, MethodConfig]:
    """A config per method: its defaults, the options it has, and its own --set values."""
    check_method_names(names)
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    # What is said for a method holds for all its rows, unless something else is said for a label.
    for text in sorted(single, key=lambda text: text.partition(".")[0] not in METHOD_CONFIGS):
        method, _, setting = text.partition(".")
        meant = [name for name in names if method in (name, label_of(name), method_of(name))]
        if not meant:
            raise UsageError(f"--set {text}: write METHOD.KEY=VALUE with a method of --methods ({', '.join(own)})")
        for name in meant:
            own[name] |= opt.parse_pairs([setting], "--set")
    used: set[str] = set()
    configs = {}
    for name in names:
        plain = method_of(name)
        known = METHOD_CONFIGS[plain].__dataclass_fields__
        applying = {key: value for key, value in shared.items() if key in known}
        used |= applying.keys()
        with refused_values():
            configs[name] = method_config(plain, applying | own[name], batch_size=batch_size)
    if unused := shared.keys() - used:
        options = [f"--{'lambda' if name == 'ranking_weight' else name.replace('_', '-')}" for name in sorted(unused)]
        raise UsageError(f"none of {', '.join(names)} has a setting for {', '.join(options)}")
    return configs


def _print_table(results: dict[str, Any]) -> None:
    from remtta.evaluation.results import plain_table, table_rows

    if not sys.stdout.isatty():
        typer.echo(plain_table(results))
        return
    from rich.console import Console
    from rich.table import Table

    header, rows = table_rows(results)
    table = Table(header[0], *(row[0] for row in rows))
    for place, title in enumerate(header[1:], 1):
        table.add_row(title, *(row[place] for row in rows), end_section=place == len(results_domains(results)))
    Console().print(table)


def results_domains(results: dict[str, Any]) -> list[str]:
    """The domains of a table, in order."""
    return list(next(iter(results["methods"].values()))["error"])
