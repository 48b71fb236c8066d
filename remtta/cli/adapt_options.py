"""Options specific to `remtta adapt`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

from remtta.errors import UsageError
from remtta.files import check_not_input
from remtta.options import RunOptions, StreamOptions
from remtta.options.option import in_output, in_stream
from remtta.options.run_options import Engine
from remtta.runs.folder import check_folder, check_same_model, check_site
from remtta.watching.annotated import AnnotatedVideo, check_video
from remtta.watching.health import check_health_path
from remtta.watching.mqtt import Publisher, parse_topic

if TYPE_CHECKING:
    from remtta.runs.run_writer import Viewer
    from remtta.streams.sources import Stream
    from remtta.watching.metrics import Metrics


@dataclass(frozen=True)
class AdaptOptions:
    """One stream or many, the outputs, and the viewers."""

    streams: Annotated[
        bool,
        in_stream(
            "SOURCE is a file with one name=address per line; all streams share one model.",
            common=True,
            more="scale.md",
        ),
    ] = False
    engine: Annotated[
        Engine, in_output("Workers of --jobs: local processes, or Ray workers.", more="scale.md#many-workers")
    ] = "processes"
    jobs: Annotated[
        int,
        in_output(
            "Workers to divide the streams of --streams among, each with its own model.", flags=("--jobs", "-j"), min=1
        ),
    ] = 1
    output: Annotated[
        Path | None,
        in_output(
            "Folder for the files of the run.",
            flags=("--output", "-o"),
            metavar="DIR",
            default="runs/<UTC time>",
            common=True,
            more="files.md#the-run-folder",
        ),
    ] = None
    predictions: Annotated[
        str | None, in_output("Also write predictions to standard output, as JSON Lines.", metavar="-", common=True)
    ] = None
    health: Annotated[
        Path | None,
        in_output(
            "Status file (JSON), rewritten every few seconds: time, state, frames, updates.",
            metavar="FILE",
            more="reliability.md#as-a-service",
        ),
    ] = None
    metrics: Annotated[
        str | None,
        in_output(
            "Serve Prometheus metrics: 9108 to this machine only, 0.0.0.0:9108 to everyone.",
            metavar="[HOST:]PORT",
            more="reliability.md#metrics",
        ),
    ] = None
    annotate: Annotated[
        Path | None,
        in_output(
            "Write a video of the frames with label, probability, answering model and guard state.",
            metavar="FILE.mp4",
            more="reliability.md#annotated-video",
        ),
    ] = None
    mqtt: Annotated[
        str | None,
        in_output(
            "Also send predictions to an MQTT broker, each at least once; mqtts:// for TLS.",
            metavar="mqtt://HOST/TOPIC",
            more="reliability.md#mqtt",
        ),
    ] = None

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
        if self.streams and (self.annotate or self.mqtt):
            raise UsageError("--annotate and --mqtt are for one stream; leave them out with --streams")
        if self.divides and not self.streams:
            raise UsageError("--jobs and --engine divide the streams of a list; add --streams, or leave them out")
        if self.mqtt:
            parse_topic(self.mqtt)

    def open(self, source: str, stream: StreamOptions, run: RunOptions) -> Stream | dict[str, Stream]:
        """Open the stream, or the streams of a list."""
        from remtta.streams.lists import read_sources
        from remtta.streams.sources import open_streams, open_with

        if self.streams:
            return open_streams(read_sources(Path(source)), stream, resuming=run.resume)
        return open_with(source, stream, wait_at_start=stream.live is not None or run.resume)

    @property
    def echo(self) -> BinaryIO | None:
        """The stream that receives predictions as well as the file, if requested."""
        return sys.stdout.buffer if self.predictions else None

    def check_folder(
        self, folder: Path, run: RunOptions, frames: Stream | dict[str, Stream], model: str | None
    ) -> None:
        """Raise UsageError if the run may not write to its folder, the one there to resume has another model (None: it
        is not known yet), or the health file or video cannot be written.
        """
        if self.health is not None:
            check_health_path(self.health, folder)
        if isinstance(frames, dict):
            check_site(folder, frames, overwrite=run.overwrite, resume=run.resume)
        else:
            check_folder(folder, overwrite=run.overwrite, resume=run.resume)
            if run.resume and model is not None:
                check_same_model(folder, model)
        if self.annotate is not None:
            check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)
            if run.overwrite and not isinstance(frames, dict):
                check_not_input(self.annotate, "--annotate", [frames.name])

    @contextlib.contextmanager
    def watched(self) -> Iterator[Metrics | None]:
        """Serve the run's counts during the block, if requested."""
        if self.metrics is None:
            yield None
            return
        from remtta.watching.metrics import Metrics, parse_metrics_address

        with contextlib.closing(Metrics(parse_metrics_address(self.metrics))) as metrics:
            yield metrics

    @contextlib.contextmanager
    def viewers(self, folder: Path, run: RunOptions) -> Iterator[list[Viewer]]:
        """Yield the run's viewers, which are closed at the end."""
        with contextlib.ExitStack() as looking:
            viewers: list[Viewer] = []
            if self.mqtt:
                publisher = Publisher(parse_topic(self.mqtt), folder, resume=run.resume)
                viewers.append(looking.enter_context(contextlib.closing(publisher)))
            if self.annotate is not None:
                path = check_video(self.annotate, folder, overwrite=run.overwrite, resume=run.resume)
                viewers.append(looking.enter_context(contextlib.closing(AnnotatedVideo(path))))
            yield viewers
