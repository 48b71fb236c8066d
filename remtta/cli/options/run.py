"""What a run of `remtta adapt` leaves, and what it keeps to on the way."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import typer

from remtta.cli.options.answers import AnswerOptions
from remtta.cli.options.method import MethodOptions
from remtta.cli.options.stream import StreamOptions
from remtta.cli.parsing import parse_size
from remtta.cli.reporting import refused_values
from remtta.errors import UsageError
from remtta.options import RunOptions
from remtta.runs.folder import check_folder, check_site, check_writable, default_folder
from remtta.runs.health import check_health_path

if TYPE_CHECKING:
    from remtta.runs.metrics import Metrics

_option = partial(typer.Option, rich_help_panel="Stream and output")


@dataclass(frozen=True)
class OutputOptions:
    """The run folder, and what is in it."""

    output: Annotated[Path | None, _option("--output", "-o", help="Run folder. Default: runs/<UTC time>.")] = None
    overwrite: Annotated[bool, _option("--overwrite", help="Replace an earlier run in the folder.")] = False
    resume: Annotated[
        bool, _option("--resume", help="Go on with the run in --output, if there is one, as if it had not stopped.")
    ] = False
    replay: Annotated[
        bool,
        _option(
            "--replay",
            help="With --resume and --predictions -: first pass on again what the reader may not have had.",
        ),
    ] = RunOptions.replay
    predictions: Annotated[
        str | None, _option(metavar="-", help="- also writes the JSON Lines to standard output.")
    ] = None
    topk: Annotated[int, _option(help="Classes listed per frame.")] = RunOptions.topk
    logits: Annotated[bool, _option("--logits", help="Write all logits.")] = RunOptions.logits
    save_every: Annotated[int, _option(help="Updates between saves of state and delta; half a minute is the most.")] = (
        RunOptions.save_every
    )
    save_full: Annotated[bool, _option("--save-full", help="Save a delta also where every weight changes.")] = (
        RunOptions.save_full
    )

    def check_predictions(self) -> None:
        """Refuse predictions to anything but standard output, and a replay of none."""
        if self.predictions not in (None, "-"):
            raise UsageError("--predictions takes -; the file is always predictions.jsonl in the run folder")
        if self.replay and not (self.predictions and self.resume):
            raise UsageError(
                "--replay passes on again what the reader of an earlier part may not have had; add --predictions - and "
                "--resume"
            )

    def check_resume(self) -> None:
        """Refuse to go on with a run in no folder."""
        if self.resume and self.output is None:
            raise UsageError("--resume goes on with the run in a folder; name it with --output")

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

    def folder(self, health: Path | None, streams: Iterable[str] = ()) -> Path:
        """The run folder, if the run may write there.

        Args:
            health: The health file, which must not be one of the folder's own.
            streams: Names of the streams, each of which has a folder in it, where there are many.

        Raises:
            UsageError: If it may not.
        """
        folder = self.output or default_folder()
        if health is not None:
            check_health_path(health, folder)
        if streams:
            check_site(folder, streams, overwrite=self.overwrite, resume=self.resume)
        elif self.resume:
            check_writable(folder)
        else:
            check_folder(folder, overwrite=self.overwrite)
        return folder


@dataclass(frozen=True)
class ServiceOptions:
    """What a long run keeps to: time per frame, memory, a sign of life, and what it does at a bad frame."""

    max_ms: Annotated[float | None, _option(help="Mean time per frame in ms: updates are left out to keep it.")] = None
    realtime: Annotated[
        bool, _option("--realtime", help="Leave out updates while a video or live source runs ahead.")
    ] = RunOptions.realtime
    latency: Annotated[
        bool, _option("--latency", help="Hand out predictions before the update on their batch begins.")
    ] = RunOptions.latency
    flush_after: Annotated[
        float | None,
        _option(
            metavar="SECONDS",
            help="Predict frames that have waited so long for their batch to be full; they are learned from with it.",
        ),
    ] = RunOptions.flush_after
    max_memory: Annotated[
        str | None,
        _option(metavar="SIZE", help="Memory to keep within, such as 2G: so many images at a time as fit."),
    ] = None
    health: Annotated[
        Path | None,
        _option(metavar="FILE", help="JSON file, replaced every few seconds with time, state, frames and updates."),
    ] = None
    metrics: Annotated[
        str | None,
        _option(metavar="[HOST]:PORT", help="Serve counts, lag, entropy and latencies to Prometheus, such as :9108."),
    ] = None
    metrics_file: Annotated[
        Path | None,
        _option(metavar="FILE.prom", help="The same in a file for node_exporter's text collector, every ten seconds."),
    ] = None
    on_error: Annotated[Literal["skip", "stop"], _option(help="At a frame that cannot be read.")] = RunOptions.on_error

    @contextlib.contextmanager
    def watched(self) -> Iterator[Metrics | None]:
        """What serves the run's counts meanwhile, if that is asked for.

        Raises:
            UsageError: If it cannot be had.
        """
        if self.metrics is None and self.metrics_file is None:
            yield None
            return
        from remtta.runs.metrics import Metrics, parse_metrics_address

        address = None if self.metrics is None else parse_metrics_address(self.metrics)
        with contextlib.closing(Metrics(address, self.metrics_file)) as metrics:
            yield metrics


@refused_values()
def run_options(
    method: MethodOptions,
    answers: AnswerOptions,
    output: OutputOptions,
    stream: StreamOptions,
    service: ServiceOptions,
    *,
    seed: int,
) -> RunOptions:
    """How the stream is run.

    Raises:
        UsageError: If a value is out of range, or two exclude each other.
    """
    return RunOptions(
        batch_size=method.shared.batch_size,
        topk=output.topk,
        logits=output.logits,
        each=answers.each,
        save_every=output.save_every,
        save_full=output.save_full,
        reset_every=method.reset_every,
        on_error=service.on_error,
        require_frames=stream.require_frames,
        overwrite=output.overwrite,
        resume=output.resume,
        replay=output.replay,
        seed=seed,
        max_ms=service.max_ms,
        realtime=service.realtime,
        latency=service.latency,
        flush_after=service.flush_after,
        max_memory=None if service.max_memory is None else parse_size(service.max_memory),
        guard=answers.guard_options(method),
        adapt=method.adapt,
        smooth=answers.smooth,
        estimate=answers.estimate,
        expire_below=answers.expire_below,
        preset=method.preset,
    )
