"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import typer

from remtta.cli.loading import import_uncollected, load_classifier, model_arguments
from remtta.cli.options.answers import AnswerOptions
from remtta.cli.options.method import MethodOptions
from remtta.cli.options.model import ModelOptions
from remtta.cli.options.run import OutputOptions, ServiceOptions, run_options
from remtta.cli.options.running import RunningOptions, under_torchrun
from remtta.cli.options.stream import Source, StreamOptions
from remtta.cli.options.viewing import ViewOptions
from remtta.cli.progress import progress
from remtta.cli.reporting import close_stdout, say, signal_exit_code
from remtta.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from remtta.runs.ranks import Ranks
    from remtta.runs.site import SiteSummary
    from remtta.runs.summary import RunSummary
    from remtta.runs.viewing import Viewer
    from remtta.streams.sources import Stream

_FAILURE, _STOPPED_BY_GUARD = 1, 5

_log = logging.getLogger("remtta")


def adapt(
    source: Source,
    model: ModelOptions,
    method: MethodOptions,
    answers: AnswerOptions,
    output: OutputOptions,
    stream: StreamOptions,
    service: ServiceOptions,
    view: ViewOptions,
    running: RunningOptions,
) -> None:
    """Predict every frame of SOURCE, and adapt the model to it on the way.

    Leaves in the run folder: predictions.jsonl; delta.safetensors, what was learned; run.json, how it was made;
    events.jsonl, what the guard decided; state.safetensors, what --resume goes on from.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --checkpoint vit.safetensors --output run1

      remtta adapt cams.txt --streams --output site1

      torchrun --nproc-per-node 8 -m remtta adapt clip.mp4 --output run1

      find . -name '*.jpg' | sort -V | remtta adapt - --predictions - | jq 'select(.class).label'
    """
    with running.command() as interrupts:
        with contextlib.ExitStack() as during:
            # What needs no torch comes first: a wrong path is told at once.
            output.check_predictions()
            method.check()
            output.check_resume()
            given, labels = model.given(), model.class_names()
            how: dict[str, Any] = {
                "method": method.name,
                "config": method.config(running.precision),
                "options": run_options(method, answers, output, stream, service, seed=running.seed),
            }
            if not running.follows:
                how["metrics"] = during.enter_context(service.watched())
                echo, frames = output.echo(), _open(source, stream, output)
                folder = output.folder(service.health, frames if isinstance(frames, dict) else ())
                view.check(folder, frames, output)
            import_uncollected("remtta.runs.adapt")
            how["source_data"] = method.source.checked([method.name], calibrates=answers.estimate is not None)
            ranks = during.enter_context(running.ranks(interrupts))
            start = model.start()
            classifier = _load(model_arguments(given, start), labels, method, running)
            if running.follows:
                _follow(classifier, ranks, **how)
            how |= during.enter_context(_shown(view, folder, frames, output, running))
            how |= {"delta": start, "health": service.health, "interrupts": interrupts}
            summary = _adapt(classifier, frames, folder, echo, ranks, **how)
        _report(summary, output, running)
    raise typer.Exit(_exit_code(summary))


def _open(source: str, stream: StreamOptions, output: OutputOptions) -> Stream | dict[str, Stream]:
    """The stream, or the streams of a list."""
    if not stream.streams:
        return stream.open(source, resume=output.resume)
    if output.predictions:
        raise UsageError("--predictions - is for one stream; with --streams, follow each run's predictions.jsonl")
    if under_torchrun():
        raise UsageError("torchrun has its processes share the batches of one stream; run --streams without it")
    return stream.open_all(source, resume=output.resume)


def _num_frames(frames: Stream | dict[str, Stream]) -> int | None:
    counts = [stream.num_frames for stream in (frames.values() if isinstance(frames, dict) else [frames])]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _load(
    arguments: dict[str, Any], labels: list[str] | None, method: MethodOptions, running: RunningOptions
) -> nn.Module:
    """The model, ready for the run."""
    running.set_threads()
    classifier = load_classifier(arguments, labels, running.device, adapts=method.adapts, quiet=running.quiet)
    if running.compile_model:
        _log.info("compiling the model; the first batches take a minute or more")
    running.compile(classifier)
    return classifier


@contextlib.contextmanager
def _shown(
    view: ViewOptions,
    folder: Path,
    frames: Stream | dict[str, Stream],
    output: OutputOptions,
    running: RunningOptions,
) -> Iterator[dict[str, Any]]:
    """Who is told of each batch meanwhile."""
    with (
        progress(_num_frames(frames), hidden=running.quiet, lines=running.as_json) as advance,
        view.viewers(folder, output) as viewers,
    ):
        yield {"on_batch": advance, "viewers": viewers}


def _adapt(
    classifier: nn.Module,
    frames: Stream | dict[str, Stream],
    folder: Path,
    echo: BinaryIO | None,
    ranks: Ranks | None,
    *,
    viewers: list[Viewer],
    **how: Any,
) -> RunSummary | SiteSummary:
    if isinstance(frames, dict):
        from remtta.runs.site import adapt_streams

        return adapt_streams(classifier, frames, folder, **how)
    from remtta.runs.adapt import adapt_stream

    return adapt_stream(classifier, frames, folder, echo=echo, ranks=ranks, viewers=viewers, **how)


def _follow(classifier: nn.Module, ranks: Ranks | None, **how: Any) -> NoReturn:
    from remtta.runs.adapt import follow_stream

    assert ranks is not None
    follow_stream(classifier, ranks, **how)
    raise typer.Exit


def _exit_code(summary: RunSummary | SiteSummary) -> int:
    """Of many streams: the signal's, else that of a failure if any failed."""
    if summary.exit_reason == "guard":
        return _STOPPED_BY_GUARD
    return _FAILURE if summary.exit_reason.startswith("error") else signal_exit_code(summary.signum)


def _report(summary: RunSummary | SiteSummary, output: OutputOptions, running: RunningOptions) -> None:
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
