"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import typer

from remtta.cli.classifiers import import_uncollected, load_classifier, load_start
from remtta.cli.progress import progress
from remtta.cli.reporting import close_stdout, say, signal_exit_code
from remtta.cli.running import RunningOptions
from remtta.errors import UsageError
from remtta.methods.settings.chosen import MethodOptions
from remtta.options import ModelOptions, RunOptions, StreamOptions
from remtta.options.option import Option
from remtta.options.run import Engine
from remtta.runs.folder import check_folder, check_site, check_writable, run_folder
from remtta.watching.annotated import AnnotatedVideo, check_video
from remtta.watching.health import check_health_path
from remtta.watching.mqtt import Publisher, parse_topic

if TYPE_CHECKING:
    from torch import nn

    from remtta.adapt.planning import Setup
    from remtta.adapt.site import SiteSummary
    from remtta.engines.interrupts import Interrupts
    from remtta.runs.summary import RunSummary
    from remtta.runs.viewing import Viewer
    from remtta.streams.sources import Stream
    from remtta.watching.metrics import Metrics

_FAILURE, _STOPPED_BY_GUARD = 1, 5

_stream = partial(Option, panel="Stream")
_output = partial(Option, panel="Output and running")

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class AdaptOptions:
    """One stream or many, where results go, and who looks on meanwhile."""

    streams: Annotated[
        bool,
        _stream(
            "SOURCE is a file that lists many, name=address on each line; one model for all.",
            common=True,
            more="scale.md",
        ),
    ] = False
    engine: Annotated[
        Engine,
        _output(
            "Where the workers of --jobs are: processes of this machine, or the workers of Ray.",
            more="scale.md#many-workers",
        ),
    ] = "processes"
    jobs: Annotated[
        int,
        _output(
            "Divide the streams of --streams over so many workers, each with the model.", flags=("--jobs", "-j"), min=1
        ),
    ] = 1
    output: Annotated[
        Path | None,
        _output(
            "Run folder.",
            flags=("--output", "-o"),
            metavar="DIR",
            default="runs/<UTC time>",
            common=True,
            more="files.md#the-run-folder",
        ),
    ] = None
    predictions: Annotated[
        str | None, _output("- also writes the JSON Lines to standard output.", metavar="-", common=True)
    ] = None
    health: Annotated[
        Path | None,
        _output(
            "JSON file, replaced every few seconds with time, state, frames and updates.",
            metavar="FILE",
            more="reliability.md#as-a-service",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        _output(
            "Serve counts, lag, entropy and latencies to Prometheus: 9108 to this machine, 0.0.0.0:9108 to all.",
            metavar="[HOST:]PORT",
            more="reliability.md#metrics",
        ),
    ] = None
    annotate: Annotated[
        Path | None,
        _output(
            "Video of the frames with label, probability, who answered and the guard's standing.",
            metavar="FILE.mp4",
            more="reliability.md#annotated-video",
        ),
    ] = None
    mqtt: Annotated[
        str | None,
        _output(
            "Send the predictions to an MQTT broker, too, each at least once; mqtts:// for TLS.",
            metavar="mqtt://HOST/TOPIC",
            more="reliability.md#mqtt",
        ),
    ] = None

    @property
    def divides(self) -> bool:
        """Whether workers have the streams."""
        return self.jobs > 1 or self.engine != "processes"

    def check(self, run: RunOptions) -> None:
        """Refuse what excludes itself, before any work.

        Raises:
            UsageError: Saying what.
        """
        if self.predictions not in (None, "-"):
            raise UsageError("--predictions takes -; the file is always predictions.jsonl in the run folder")
        if run.replay and not (self.predictions and run.resume):
            raise UsageError(
                "--replay passes on again what the reader of an earlier part may not have had; add --predictions - and "
                "--resume"
            )
        if run.resume and self.output is None:
            raise UsageError("--resume goes on with the run in a folder; name it with --output")
        if self.streams and self.predictions:
            raise UsageError("--predictions - is for one stream; with --streams, follow each run's predictions.jsonl")
        if self.streams and (self.annotate or self.mqtt):
            raise UsageError("--annotate and --mqtt are for one stream; leave them out with --streams")
        if self.divides and not self.streams:
            raise UsageError("--jobs and --engine divide the streams of a list; add --streams, or leave them out")
        if self.mqtt:
            parse_topic(self.mqtt)

    def open(self, source: str, stream: StreamOptions, run: RunOptions) -> Stream | dict[str, Stream]:
        """The stream, or the streams of a list."""
        from remtta.streams.lists import read_sources
        from remtta.streams.sources import open_streams, open_with

        if self.streams:
            return open_streams(read_sources(Path(source)), stream, going_on=run.resume)
        return open_with(source, stream, wait_at_start=stream.live is not None or run.resume)

    def echo(self) -> BinaryIO | None:
        """Where predictions go beside the file.

        Raises:
            UsageError: If standard output is closed.
        """
        if self.predictions is None:
            return None
        if sys.stdout is None:
            raise UsageError("--predictions - needs standard output, which is closed")
        return sys.stdout.buffer

    def check_folder(self, folder: Path, run: RunOptions, frames: Stream | dict[str, Stream]) -> None:
        """Refuse a run folder that the run may not write to, or that a health file or video cannot be had with.

        Raises:
            UsageError: Saying why.
        """
        if self.health is not None:
            check_health_path(self.health, folder)
        if isinstance(frames, dict):
            check_site(folder, frames, overwrite=run.overwrite, resume=run.resume)
        elif run.resume:
            check_writable(folder)
        else:
            check_folder(folder, overwrite=run.overwrite)
        if self.annotate is not None:
            check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Metrics | None]:
        """What serves the run's counts meanwhile, if that is asked for.

        Raises:
            UsageError: If it cannot be had.
        """
        if self.metrics is None:
            yield None
            return
        from remtta.watching.metrics import Metrics, parse_metrics_address

        with contextlib.closing(Metrics(parse_metrics_address(self.metrics))) as metrics:
            yield metrics

    @contextlib.contextmanager
    def viewers(self, folder: Path, run: RunOptions) -> Iterator[list[Viewer]]:
        """Who looks on, as long as the run goes."""
        with contextlib.ExitStack() as looking:
            viewers: list[Viewer] = []
            if self.mqtt:
                publisher = Publisher(parse_topic(self.mqtt), folder, resume=run.resume)
                viewers.append(looking.enter_context(contextlib.closing(publisher)))
            if self.annotate is not None:
                path = check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)
                viewers.append(looking.enter_context(contextlib.closing(AnnotatedVideo(path))))
            yield viewers


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
    """Predict every frame of SOURCE, and adapt the model to it on the way.

    Leaves in the run folder: predictions.jsonl; delta.safetensors, what was learned; run.json, how it was made;
    events.jsonl, what the guard decided; state.safetensors, what --resume goes on from.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --checkpoint vit.safetensors --output run1

      remtta adapt cams.txt --streams --output site1

      find . -name '*.jpg' | sort -V | remtta adapt - --predictions - | jq 'select(.class).label'
    """
    with running.command() as interrupts, contextlib.ExitStack() as during:
        # What needs no torch comes first: a wrong path is told at once.
        own.check(run)
        config = method.config(run.batch_size)
        _warn_of_answer(method, run)
        metrics = during.enter_context(own.watched())
        echo, frames = own.echo(), own.open(source, stream, run)
        folder = during.enter_context(run_folder(own.output))
        own.check_folder(folder, run, frames)
        import_uncollected("remtta.adapt.one_stream")
        from remtta.adapt.planning import Setup
        from remtta.methods.source_data import check_source_data

        check_source_data([method.method], method.shared.source_data, calibrates=run.estimate is not None)
        start = load_start(method.shared.delta)
        running.set_threads(1 if own.divides else None)
        adapts = method.method != "source"
        classifier = load_classifier(model, running.device, start=start, adapts=adapts, quiet=running.quiet)
        running.compile(classifier)
        advance = during.enter_context(progress(_num_frames(frames), hidden=running.quiet, lines=running.as_json))
        told = _Told(echo, metrics, during.enter_context(own.viewers(folder, run)), advance, interrupts)
        setup = Setup(method.method, config, run, start, method.shared.source_data)
        summary = _adapt(classifier, frames, folder, setup, own, told)
        during.close()
        _report(summary, own, running)
    raise typer.Exit(_exit_code(summary))


class _Told(NamedTuple):
    """Who is told of a run meanwhile, and what stops it."""

    echo: BinaryIO | None
    metrics: Metrics | None
    viewers: list[Viewer]
    advance: Callable[[RunSummary | SiteSummary], None]
    interrupts: Interrupts


def _adapt(
    classifier: nn.Module,
    frames: Stream | dict[str, Stream],
    folder: Path,
    setup: Setup,
    own: AdaptOptions,
    told: _Told,
) -> RunSummary | SiteSummary:
    """One stream, or many."""
    from remtta.adapt.many_streams import adapt_streams
    from remtta.adapt.one_stream import adapt_stream

    if isinstance(frames, dict):
        return adapt_streams(
            classifier,
            frames,
            folder,
            setup,
            engine=own.engine,
            jobs=own.jobs,
            health=own.health,
            metrics=told.metrics,
            on_batch=told.advance,
            interrupts=told.interrupts,
        )
    return adapt_stream(
        classifier,
        frames,
        folder,
        method=setup.method,
        config=setup.config,
        options=setup.options,
        delta=setup.delta,
        source_data=setup.source_data,
        echo=told.echo,
        health=own.health,
        metrics=told.metrics,
        on_batch=told.advance,
        viewers=told.viewers,
        interrupts=told.interrupts,
    )


def _warn_of_answer(method: MethodOptions, run: RunOptions) -> None:
    answer = run.guard.answer if run.guard else None
    if method.method == "source" and answer not in (None, "adapted"):
        _log.warning("--answer %s changes nothing: source is the source model", answer)


def _num_frames(frames: Stream | dict[str, Stream]) -> int | None:
    counts = [stream.num_frames for stream in (frames.values() if isinstance(frames, dict) else [frames])]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _exit_code(summary: RunSummary | SiteSummary) -> int:
    """Of many streams: the signal's, else that of a failure if any failed."""
    if summary.exit_reason == "guard":
        return _STOPPED_BY_GUARD
    return _FAILURE if summary.exit_reason.startswith("error") else signal_exit_code(summary.signum)


def _report(summary: RunSummary | SiteSummary, own: AdaptOptions, running: RunningOptions) -> None:
    """Say what came of it; the path of a folder that the user did not name is data."""
    if summary.exit_reason == "closed pipe":
        close_stdout()
    if running.quiet or (summary.exit_reason == "completed" and not summary.num_frames):
        return
    if running.as_json:
        say(summary.report().partition("\n")[0], as_json=True, **summary.figures())
    else:
        say(summary.report())
    if own.output is None and own.predictions is None and summary.output.exists():
        typer.echo(str(summary.output))
