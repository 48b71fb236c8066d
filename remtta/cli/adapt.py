"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remtta.cli.reporting import discard_output, print_message, run_progress, signal_exit_code
from remtta.cli.running import RunningOptions, load_start, load_torch
from remtta.deployment.annotated import AnnotatedVideo, check_video
from remtta.deployment.health import check_health_path
from remtta.deployment.mqtt import Publisher, parse_topic
from remtta.deployment.publishing import ModelPublisher
from remtta.errors import UsageError, check_installed
from remtta.files import check_not_input
from remtta.interrupts import Interrupts
from remtta.methods.settings.chosen import MethodOptions, default_method
from remtta.methods.table import METHOD_TABLE
from remtta.options import DEFAULT_MODEL, ModelOptions, RunOptions, StreamOptions
from remtta.options.option import output_folder, output_option, stream_option
from remtta.options.run_options import Engine
from remtta.runs.folder import check_folder, check_same_model, check_site, run_folder

if TYPE_CHECKING:
    from torch import nn

    from remtta.deployment.metrics import Metrics
    from remtta.deployment.stream_group import StreamGroupSummary
    from remtta.pipeline.build import AdaptationConfig
    from remtta.runs.summary import RunSummary
    from remtta.streams.sources import Stream

    Summary = RunSummary | StreamGroupSummary

_FAILURE, _STOPPED_BY_GUARD = 1, 5


@dataclass(frozen=True)
class AdaptOptions:
    """One stream or many, the output files, and the viewers."""

    streams: Annotated[
        bool,
        stream_option(
            "SOURCE is a file with one name=address per line; the streams share one model.",
            common=True,
            more="scale.md",
        ),
    ] = False
    engine: Annotated[
        Engine, output_option("Workers of --jobs: local processes, or Ray workers.", more="scale.md#many-workers")
    ] = "processes"
    jobs: Annotated[
        int,
        output_option(
            "Number of workers that share the streams of --streams, each with its own model.",
            flags=("--jobs", "-j"),
            min=1,
        ),
    ] = 1
    output: Annotated[Path | None, output_folder(more="files.md#the-run-folder")] = None
    predictions: Annotated[
        str | None, output_option("Also write predictions to standard output, as JSON Lines.", metavar="-", common=True)
    ] = None
    health: Annotated[
        Path | None,
        output_option(
            "Status file (JSON), rewritten every few seconds: time, state, frames, updates.",
            metavar="FILE",
            more="reliability.md#as-a-service",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        output_option(
            "Serve Prometheus metrics: 9108 for this machine only, 0.0.0.0:9108 for every host.",
            metavar="[HOST:]PORT",
            more="reliability.md#metrics",
        ),
    ] = None
    annotate: Annotated[
        Path | None,
        output_option(
            "Write a video of the frames with label, probability, predicting model and guard state.",
            metavar="FILE.mp4",
            more="reliability.md#annotated-video",
        ),
    ] = None
    mqtt: Annotated[
        str | None,
        output_option(
            "Also send predictions to an MQTT broker, each at least once; mqtts:// for TLS.",
            metavar="mqtt://HOST/TOPIC",
            more="reliability.md#mqtt",
        ),
    ] = None

    publish: Annotated[
        Path | None,
        output_option(
            "Replace this file with the adapted model now and then: .onnx, .safetensors, or delta.safetensors; or add "
            "versions to this folder of a Triton model.",
            metavar="PATH",
            more="onnx.md",
        ),
    ] = None
    publish_every: Annotated[
        str, output_option("Time between publications: 10m, or a number of updates.", metavar="N|Nm")
    ] = "10m"

    @property
    def divides(self) -> bool:
        """True if streams are divided among workers."""
        return self.jobs > 1 or self.engine != "processes"

    def check(self, run: RunOptions) -> None:
        """Raise UsageError if options are incompatible, before any work."""
        if self.predictions not in (None, "-"):
            raise UsageError("--predictions takes -; the file is always predictions.jsonl in the run folder")
        if self.predictions and sys.stdout is None:
            raise UsageError("--predictions - needs standard output, which is closed")
        if run.resume and self.output is None:
            raise UsageError("--resume continues the run in a folder; name it with --output")
        if self.streams and self.predictions:
            raise UsageError("--predictions - is for one stream; with --streams, follow each run's predictions.jsonl")
        if self.streams and (self.annotate or self.mqtt or self.publish):
            raise UsageError("--annotate, --mqtt and --publish are for one stream; leave them out with --streams")
        if self.divides and not self.streams:
            raise UsageError("--jobs and --engine divide the streams of a list; add --streams, or leave them out")
        if self.engine == "ray":
            check_installed("ray", "cluster", "--engine ray")
        if self.mqtt:
            parse_topic(self.mqtt)

    def open(self, source: str, stream: StreamOptions, run: RunOptions) -> Stream | dict[str, Stream]:
        """Open the stream, or the streams of a list."""
        from remtta.deployment.stream_lists import read_sources
        from remtta.streams.sources import open_streams, open_with

        if self.streams:
            return open_streams(read_sources(Path(source)), stream, resuming=run.resume)
        return open_with(source, stream, wait_at_start=stream.live is not None or run.resume)

    def check_folder(
        self, folder: Path, run: RunOptions, frames: Stream | dict[str, Stream], model: str | None
    ) -> None:
        """Raise UsageError if the run may not write to its folder, the run to resume has another model (None if it is
        not known yet), or the health file or video cannot be written.
        """
        if self.health is not None:
            check_health_path(self.health, folder)
        if isinstance(frames, dict):
            check_site(folder, frames, overwrite=run.overwrite, resume=run.resume)
            return
        check_folder(folder, overwrite=run.overwrite, resume=run.resume)
        if run.resume and model is not None:
            check_same_model(folder, model)
        if self.annotate is not None:
            check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)
            if run.overwrite:
                check_not_input(self.annotate, "--annotate", [frames.name])

    def adapt(
        self,
        classifier: nn.Module,
        frames: Stream | dict[str, Stream],
        folder: Path,
        config: AdaptationConfig,
        *,
        metrics: Metrics | None,
        on_batch: Callable[[Summary], None],
        interrupts: Interrupts,
    ) -> Summary:
        """Adapt the classifier to the stream, or to the streams of a list."""
        from remtta.adapt.one_stream import adapt_stream
        from remtta.deployment.many_streams import adapt_streams

        if isinstance(frames, dict):
            return adapt_streams(
                classifier,
                frames,
                folder,
                config,
                engine=self.engine,
                jobs=self.jobs,
                health=self.health,
                metrics=metrics,
                on_batch=on_batch,
                interrupts=interrupts,
            )
        with contextlib.ExitStack() as stack:
            viewers: list[Publisher | AnnotatedVideo] = []
            run = config.options
            if self.mqtt:
                viewers.append(Publisher(parse_topic(self.mqtt), folder, resume=run.resume))
                stack.callback(viewers[-1].close)
            if self.annotate is not None:
                path = check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)
                viewers.append(AnnotatedVideo(path))
                stack.callback(viewers[-1].close)
            return adapt_stream(
                classifier,
                frames,
                folder,
                method=config.method,
                config=config.config,
                options=config.options,
                delta=config.delta,
                source_data=config.source_data,
                echo=sys.stdout.buffer if self.predictions else None,
                health=self.health,
                metrics=metrics,
                on_batch=on_batch,
                publisher=ModelPublisher(self.publish, self.publish_every) if self.publish else None,
                viewers=viewers,
                interrupts=interrupts,
            )


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
    options: AdaptOptions,
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
    with running.command() as interrupts, contextlib.ExitStack() as stack:
        # Checks without torch come first, so that e.g. a wrong path is reported at once.
        options.check(run)
        frames = options.open(source, stream, run)
        folder = stack.enter_context(run_folder(options.output))
        default_model = DEFAULT_MODEL if method.shared.delta is None else None
        options.check_folder(folder, run, frames, model.name or default_model)
        metrics = None
        if options.metrics is not None:
            from remtta.deployment.metrics import Metrics, parse_metrics_address

            metrics = stack.enter_context(contextlib.closing(Metrics(parse_metrics_address(options.metrics))))
        threads = 1 if options.divides else None
        classifier, config = _load(model, method, run, running, folder, default_threads=threads)
        advance = stack.enter_context(run_progress(_num_frames(frames), hidden=running.quiet, lines=running.as_json))
        summary = options.adapt(
            classifier, frames, folder, config, metrics=metrics, on_batch=advance, interrupts=interrupts
        )
        stack.close()
        _report(summary, options, running)
    if summary.exit_reason == "guard":
        raise typer.Exit(_STOPPED_BY_GUARD)
    raise typer.Exit(_FAILURE if summary.exit_reason.startswith("error") else signal_exit_code(summary.signum))


def _load(
    model: ModelOptions,
    method: MethodOptions,
    run: RunOptions,
    running: RunningOptions,
    folder: Path,
    *,
    default_threads: int | None,
) -> tuple[nn.Module, AdaptationConfig]:
    """Load torch, the classifier and the starting delta; return the classifier and the settings of the adaptation."""
    delta, source_data = method.shared.delta, method.shared.source_data
    name = method.method or default_method(model.name)
    if (method.method or delta is None) and METHOD_TABLE[name].config_class is not None:
        method.config(run.batch_size, model.name)  # refuses wrong settings before torch is loaded, which takes seconds
    load_torch("remtta.adapt.one_stream", model, delta)
    from remtta.methods.source_data import check_source_data
    from remtta.pipeline.build import AdaptationConfig

    start = load_start(delta, folder, overwrite=run.overwrite)
    base = model.name or (start.model if start else None)
    name, settings = method.method or default_method(base), method.config(run.batch_size, base)
    check_source_data([name], source_data, calibrates=run.estimate is not None)
    running.set_threads(default_threads)
    return running.load_classifier(model, start), AdaptationConfig(name, settings, run, start, source_data)


def _num_frames(frames: Stream | dict[str, Stream]) -> int | None:
    counts = [stream.num_frames for stream in (frames.values() if isinstance(frames, dict) else [frames])]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _report(summary: Summary, options: AdaptOptions, running: RunningOptions) -> None:
    """Print the summary; print the path of a folder that the user did not name to standard output."""
    if summary.exit_reason == "closed pipe":
        discard_output(sys.stdout)
    if running.quiet or (summary.exit_reason == "completed" and not summary.num_frames):
        return
    if running.as_json:
        print_message(summary.report().partition("\n")[0], as_json=True, **summary.figures())
    else:
        print_message(summary.report())
    if options.output is None and options.predictions is None and summary.output.exists():
        typer.echo(str(summary.output))
