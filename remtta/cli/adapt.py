"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from remtta.cli import options as opt
from remtta.cli.loading import model_arguments
from remtta.cli.progress import progress
from remtta.cli.reporting import close_stdout, command, refused_values, say, signal_exit_code
from remtta.errors import UsageError
from remtta.methods.settings import METHOD_CONFIGS, method_config
from remtta.options import GuardOptions, RunOptions
from remtta.runs.folder import check_folder, check_writable, default_folder
from remtta.runs.health import check_health_path

_log = logging.getLogger("remtta")

_METHOD = "Method"
_STREAM = "Stream and output"
_OPTIONS = RunOptions()
_GUARD = GuardOptions()
_STOPPED_BY_GUARD = 5
_METHODS = [name for name in METHOD_CONFIGS if name != "supervised"]  # which needs labels


def adapt(
    source: Annotated[
        str,
        typer.Argument(
            help="Image, folder, quoted glob, video, camera index, rtsp:// or http(s):// URL, or - (paths on stdin)."
        ),
    ],
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
    method: Annotated[
        str, typer.Option(help=f"{', '.join(_METHODS)}; see remtta methods.", rich_help_panel=_METHOD)
    ] = "rem",
    mask_ratios: opt.MaskRatios = None,
    ranking_weight: opt.RankingWeight = None,
    margin: opt.Margin = None,
    lr: opt.LearningRate = None,
    optimizer: opt.Optimizer = None,
    momentum: opt.Momentum = None,
    steps: opt.Steps = None,
    batch_size: opt.BatchSize = _OPTIONS.batch_size,
    micro_batch: opt.MicroBatch = None,
    adapt_layers: opt.AdaptLayers = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any other setting of the method (repeatable).", rich_help_panel=_METHOD
        ),
    ] = None,
    source_data: opt.SourceData = None,
    episodic: Annotated[
        bool, typer.Option("--episodic", help="Back to the source weights before every batch.", rich_help_panel=_METHOD)
    ] = False,
    reset_every: Annotated[
        int | None,
        typer.Option(help="Back to the source weights after this many frames.", rich_help_panel=_METHOD),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Run folder. Default: runs/<UTC time>.", rich_help_panel=_STREAM),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier run in the folder.", rich_help_panel=_STREAM)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the run in --output, if there is one, as if it had not stopped.",
            rich_help_panel=_STREAM,
        ),
    ] = False,
    guard: Annotated[
        opt.Guards,
        typer.Option(
            help="What to do when adaptation does harm: tell, go back to the source weights, or the same and end the "
            "run when the retries are used up; off for the paper's REM.",
            rich_help_panel=_STREAM,
        ),
    ] = opt.Guards.ROLLBACK,
    guard_retries: Annotated[
        int, typer.Option(min=0, help="Rollbacks; the alarm after them ends adaptation.", rich_help_panel=_STREAM)
    ] = _GUARD.retries,
    predictions: Annotated[
        str | None,
        typer.Option(metavar="-", help="- also writes the JSON Lines to standard output.", rich_help_panel=_STREAM),
    ] = None,
    topk: Annotated[int, typer.Option(help="Classes listed per frame.", rich_help_panel=_STREAM)] = _OPTIONS.topk,
    logits: Annotated[bool, typer.Option("--logits", help="Write all logits.", rich_help_panel=_STREAM)] = False,
    save_every: Annotated[
        int, typer.Option(help="Updates between saves of the delta.", rich_help_panel=_STREAM)
    ] = _OPTIONS.save_every,
    save_full: Annotated[
        bool,
        typer.Option("--save-full", help="Save a delta also where every weight changes.", rich_help_panel=_STREAM),
    ] = False,
    sort: Annotated[
        opt.Sorts, typer.Option(help="Order of a folder's or glob's files.", rich_help_panel=_STREAM)
    ] = opt.Sorts.NAME,
    frame_stride: Annotated[int, typer.Option(min=1, help="Take every K-th frame.", rich_help_panel=_STREAM)] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Stop after this many frames.", rich_help_panel=_STREAM)
    ] = None,
    null: Annotated[
        bool, typer.Option("-0", "--null", help="Paths on stdin end in NUL.", rich_help_panel=_STREAM)
    ] = False,
    reconnect_for: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Try so long to get a lost camera or network stream back; 0: end there. Default: 60. Given, or with "
            "--resume, also at the start.",
            rich_help_panel=_STREAM,
        ),
    ] = None,
    buffer: Annotated[
        opt.Buffers | None,
        typer.Option(
            help="Frames of a live source that count when the model is slower. Default: latest.",
            rich_help_panel=_STREAM,
        ),
    ] = None,
    max_ms: Annotated[
        float | None,
        typer.Option(help="Mean time per frame in ms: updates are left out to keep it.", rich_help_panel=_STREAM),
    ] = None,
    realtime: Annotated[
        bool,
        typer.Option(
            "--realtime", help="Leave out updates while a video or live source runs ahead.", rich_help_panel=_STREAM
        ),
    ] = False,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency", help="Hand out predictions before the update on their batch begins.", rich_help_panel=_STREAM
        ),
    ] = False,
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory to keep within, such as 2G: so many images at a time as fit.",
            rich_help_panel=_STREAM,
        ),
    ] = None,
    health: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON file, replaced every few seconds with time, state, frames and updates.",
            rich_help_panel=_STREAM,
        ),
    ] = None,
    on_error: Annotated[
        opt.OnError, typer.Option(help="At a frame that cannot be read.", rich_help_panel=_STREAM)
    ] = opt.OnError.SKIP,
    device: opt.Device = "auto",
    precision: opt.Precision = opt.Precisions.AUTO,
    compile_model: opt.Compile = False,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    log_format: opt.LogFormat = opt.LogFormats.TEXT,
    verbose: opt.Verbose = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Predict every frame of SOURCE, and adapt the model to it on the way.

    Leaves in the run folder: predictions.jsonl; delta.safetensors, what was learned; run.json, how it was made;
    events.jsonl, what the guard decided; state.safetensors, what --resume goes on from.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --checkpoint vit.safetensors --output run1

      find . -name '*.jpg' | sort -V | remtta adapt - --predictions - | jq 'select(.class).label'
    """
    as_json = log_format == opt.LogFormats.JSON
    with command(verbose=verbose, quiet=quiet, debug=debug, as_json=as_json) as interrupts:
        if predictions not in (None, "-"):
            raise UsageError("--predictions takes -; the file is always predictions.jsonl in the run folder")
        if method not in _METHODS:
            raise UsageError(f'unknown method "{method}"; choose {", ".join(_METHODS)}')
        if resume and output is None:
            raise UsageError("--resume goes on with the run in a folder; name it with --output")
        kwargs = opt.parse_pairs(model_kwargs)
        label_names = opt.read_labels(labels)
        with refused_values():
            config = method_config(
                method,
                opt.method_settings(
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
                | {"episodic": episodic}
                | opt.parse_pairs(settings, "--set"),
                batch_size=batch_size,
            )
            options = RunOptions(
                batch_size=batch_size,
                topk=topk,
                logits=logits,
                save_every=save_every,
                save_full=save_full,
                reset_every=reset_every,
                on_error=on_error.value,
                overwrite=overwrite,
                resume=resume,
                seed=seed,
                max_ms=max_ms,
                realtime=realtime,
                latency=latency,
                max_memory=None if max_memory is None else opt.parse_size(max_memory),
                guard=opt.guard_options(guard, guard_retries),
            )
        from remtta.streams.sources import open_stream

        # What needs no torch comes first: a wrong path is told at once.
        if predictions and sys.stdout is None:
            raise UsageError("--predictions - needs standard output, which is closed")
        stream = open_stream(
            source,
            sort=sort.value,
            frame_stride=frame_stride,
            limit=limit,
            null_separated=null,
            reconnect_for=reconnect_for,
            buffer=None if buffer is None else buffer.value,
            wait_at_start=reconnect_for is not None or resume,
        )
        folder = output or default_folder()
        if health is not None:
            check_health_path(health, folder)
        if resume:
            check_writable(folder)
        else:
            check_folder(folder, overwrite=overwrite)

        import torch

        from remtta.backbones.registry import check_adaptable, compile_blocks
        from remtta.deltas.delta import load_delta
        from remtta.methods.source_data import check_source_data
        from remtta.models.loading import load_model
        from remtta.runs.adapt import adapt_stream

        check_source_data([method], source_data)
        if threads:
            torch.set_num_threads(threads)
        start = None if delta is None else load_delta(delta)
        arguments = model_arguments(
            {
                "name": model,
                "checkpoint": checkpoint,
                "use_ema": use_ema,
                "num_classes": num_classes,
                "model_kwargs": kwargs,
                "input_size": input_size,
                "mean": mean,
                "std": std,
                "interpolation": interpolation,
                "crop_pct": crop_pct,
            },
            start,
        )
        if method != "source":
            check_adaptable(arguments["name"], arguments.get("model_kwargs"))
        classifier = load_model(**arguments, labels=label_names, device=device)
        if compile_model:
            _log.info("compiling the model; the first batches take a minute or more")
            compile_blocks(classifier)
        with progress(stream.num_frames, hidden=quiet, lines=as_json) as advance:
            summary = adapt_stream(
                classifier,
                stream,
                folder,
                method=method,
                config=config,
                options=options,
                delta=start,
                source_data=source_data,
                echo=sys.stdout.buffer if predictions else None,
                health=health,
                on_batch=advance,
                interrupts=interrupts,
            )
        if summary.exit_reason == "closed pipe":
            close_stdout()
        if not quiet:
            say(summary.report(), as_json=as_json)
    if summary.exit_reason == "guard":
        raise typer.Exit(_STOPPED_BY_GUARD)
    raise typer.Exit(signal_exit_code(summary.signum))
