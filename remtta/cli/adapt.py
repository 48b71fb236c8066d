"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remtta.cli.adapt_options import AdaptOptions
from remtta.cli.classifiers import load_classifier, load_start, load_torch
from remtta.cli.progress import progress
from remtta.cli.reporting import discard, say, signal_exit_code
from remtta.cli.running import RunningOptions
from remtta.methods.settings import METHOD_TABLE
from remtta.methods.settings.chosen import MethodOptions
from remtta.options import DEFAULT_MODEL, ModelOptions, RunOptions, StreamOptions
from remtta.runs.folder import run_folder

if TYPE_CHECKING:
    from torch import nn

    from remtta.adapt.stream_group import StreamGroupSummary
    from remtta.runs.run_writer import Viewer
    from remtta.runs.summary import RunSummary
    from remtta.streams.sources import Stream

_FAILURE, _STOPPED_BY_GUARD = 1, 5


def adapt(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Image, folder, quoted glob, video, camera index, rtsp:// or http(s):// URL, or - (paths on stdin).",
        ),
    ],
    stream: StreamOptions,
    model: ModelOptions,
    method: MethodOptions,
    run: RunOptions,
    own: AdaptOptions,
    running: RunningOptions,
) -> None:
    """Predict every frame of SOURCE, and adapt the model to the frames.

    Writes to the run folder: predictions.jsonl; delta.safetensors, the change of
    weights; run.json, settings and counts; events.jsonl, decisions of the guard;
    state.safetensors, for --resume.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --model vit_small_patch16_224 --checkpoint vit.pth

      remtta adapt cams.txt --streams --output site1

      ls -v *.jpg | remtta adapt - --predictions - | jq --unbuffered .label
    """
    with running.command() as interrupts, contextlib.ExitStack() as during:
        # Checks without torch come first, so that e.g. a wrong path is reported at once.
        own.check(run)
        frames = own.open(source, stream, run)
        folder = during.enter_context(run_folder(own.output))
        own.check_folder(folder, run, frames, model.name or (DEFAULT_MODEL if method.shared.delta is None else None))
        metrics = during.enter_context(own.watched())
        load = partial(load_torch, "remtta.adapt.one_stream", model, method.shared.delta)
        if METHOD_TABLE[method.method].kind is None:
            load()
        config = method.config(run.batch_size)
        load()
        from remtta.methods.source_data import check_source_data

        source_data = method.shared.source_data
        check_source_data([method.method], source_data, calibrates=run.estimate is not None)
        start = load_start(method.shared.delta, folder, overwrite=run.overwrite)
        running.set_threads(1 if own.divides else None)
        loaded = load_classifier(model, running.device, start=start, quiet=running.quiet)
        running.compile(loaded)
        advance = during.enter_context(progress(_num_frames(frames), hidden=running.quiet, lines=running.as_json))
        viewers = during.enter_context(own.viewers(folder, run))
        how = {"method": method.method, "config": config, "options": run, "delta": start, "source_data": source_data}
        watch = {"metrics": metrics, "on_batch": advance, "interrupts": interrupts, "health": own.health}
        summary = _adapt(loaded, frames, folder, how, own, viewers, watch)
        during.close()
        _report(summary, own, running)
    raise typer.Exit(_exit_code(summary))


def _adapt(
    classifier: nn.Module,
    frames: Stream | dict[str, Stream],
    folder: Path,
    how: dict[str, Any],
    own: AdaptOptions,
    viewers: list[Viewer],
    watch: dict[str, Any],
) -> RunSummary | StreamGroupSummary:
    from remtta.adapt.many_streams import adapt_streams
    from remtta.adapt.one_stream import adapt_stream
    from remtta.pipeline.build import AdaptationConfig

    if isinstance(frames, dict):
        return adapt_streams(
            classifier, frames, folder, AdaptationConfig(**how), engine=own.engine, jobs=own.jobs, **watch
        )
    return adapt_stream(classifier, frames, folder, **how, echo=own.echo, viewers=viewers, **watch)


def _num_frames(frames: Stream | dict[str, Stream]) -> int | None:
    counts = [stream.num_frames for stream in (frames.values() if isinstance(frames, dict) else [frames])]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _exit_code(summary: RunSummary | StreamGroupSummary) -> int:
    """Return the exit code; for many streams, that of a signal first, then that of a failure."""
    if summary.exit_reason == "guard":
        return _STOPPED_BY_GUARD
    return _FAILURE if summary.exit_reason.startswith("error") else signal_exit_code(summary.signum)


def _report(summary: RunSummary | StreamGroupSummary, own: AdaptOptions, running: RunningOptions) -> None:
    """Print the summary; the path of a folder that the user did not name goes to standard output."""
    if summary.exit_reason == "closed pipe":
        discard(sys.stdout)
    if running.quiet or (summary.exit_reason == "completed" and not summary.num_frames):
        return
    if running.as_json:
        say(summary.report().partition("\n")[0], as_json=True, **summary.figures())
    else:
        say(summary.report())
    if own.output is None and own.predictions is None and summary.output.exists():
        typer.echo(str(summary.output))
