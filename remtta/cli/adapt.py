"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import typer

from remtta.cli.loading import load_classifier, model_arguments
from remtta.cli.options.method import MethodOptions
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.running import RunningOptions
from remtta.cli.options.stream import OutputOptions, ServiceOptions, Source, StreamOptions, run_options
from remtta.cli.progress import progress
from remtta.cli.reporting import close_stdout, say, signal_exit_code

if TYPE_CHECKING:
    from torch import nn

    from remtta.runs.adapt import RunSummary

_STOPPED_BY_GUARD = 5

_log = logging.getLogger("remtta")


def adapt(
    source: Source,
    model: ModelOptions,
    method: MethodOptions,
    output: OutputOptions,
    stream: StreamOptions,
    service: ServiceOptions,
    running: RunningOptions,
) -> None:
    """Predict every frame of SOURCE, and adapt the model to it on the way.

    Leaves in the run folder: predictions.jsonl; delta.safetensors, what was learned; run.json, how it was made;
    events.jsonl, what the guard decided; state.safetensors, what --resume goes on from.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --checkpoint vit.safetensors --output run1

      find . -name '*.jpg' | sort -V | remtta adapt - --predictions - | jq 'select(.class).label'
    """
    with running.command() as interrupts:
        # What needs no torch comes first: a wrong path is told at once.
        output.check_predictions()
        method.check()
        output.check_resume()
        given, labels = model.given(), model.class_names()
        config = method.config(running.precision)
        options = run_options(method, output, stream, service, seed=running.seed)
        echo = output.echo()
        frames = stream.open(source, resume=output.resume)
        folder = output.folder(service.health)

        from remtta.runs.adapt import adapt_stream

        source_data = method.source.checked([method.method])
        running.set_threads()
        start = model.start()
        classifier = load_classifier(
            model_arguments(given, start), labels, running.device, adapts=method.adapts, quiet=running.quiet
        )
        _compile(classifier, running)
        with progress(frames.num_frames, hidden=running.quiet, lines=running.as_json) as advance:
            summary = adapt_stream(
                classifier,
                frames,
                folder,
                method=method.method,
                config=config,
                options=options,
                delta=start,
                source_data=source_data,
                echo=echo,
                health=service.health,
                on_batch=advance,
                interrupts=interrupts,
            )
        _report(summary, output, running)
    raise typer.Exit(_STOPPED_BY_GUARD if summary.exit_reason == "guard" else signal_exit_code(summary.signum))


def _compile(classifier: nn.Module, running: RunningOptions) -> None:
    if running.compile_model:
        _log.info("compiling the model; the first batches take a minute or more")
    running.compile(classifier)


def _report(summary: RunSummary, output: OutputOptions, running: RunningOptions) -> None:
    """Say what came of it; the path of a folder that the user did not name is data."""
    if summary.exit_reason == "closed pipe":
        close_stdout()
    if running.quiet or (summary.exit_reason == "completed" and not summary.num_frames):
        return
    if running.as_json:
        say(summary.report().partition("\n")[0], as_json=True, **summary.figures())
    else:
        say(summary.report())
    if output.output is None and output.predictions is None and summary.output.exists():
        typer.echo(str(summary.output))
