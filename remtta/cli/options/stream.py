"""What `remtta adapt` reads, what it leaves, and what it keeps to on the way."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

import typer

from remtta.cli.options.method import MethodOptions
from remtta.cli.parsing import parse_size
from remtta.cli.reporting import refused_values
from remtta.errors import UsageError
from remtta.methods.settings.presets import Preset, preset_of
from remtta.options import Action, Answer, GuardOptions, RunOptions, Smooth
from remtta.runs.folder import check_folder, check_site, check_writable, default_folder
from remtta.runs.health import check_health_path

if TYPE_CHECKING:
    from remtta.runs.metrics import Metrics
    from remtta.streams.sources import Stream

Source = Annotated[
    str,
    typer.Argument(
        help="Image, folder, quoted glob, video, camera index, rtsp:// or http(s):// URL, or - (paths on stdin)."
    ),
]

_option = partial(typer.Option, rich_help_panel="Stream and output")


_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class StreamOptions:
    """Which frames of a source, and in what order."""

    streams: Annotated[
        bool,
        _option("--streams", help="SOURCE is a file that lists many, name=address on each line; one model for all."),
    ] = False
    sort: Annotated[Literal["name", "mtime", "none"], _option(help="Order of a folder's or glob's files.")] = "name"
    frame_stride: Annotated[int, _option(min=1, help="Take every K-th frame.")] = 1
    limit: Annotated[int | None, _option(min=1, help="Stop after this many frames.")] = None
    null: Annotated[bool, _option("-0", "--null", help="Paths on stdin end in NUL.")] = False
    require_frames: Annotated[
        bool, _option("--require-frames", help="Fail (exit code 1) where the list on stdin is empty.")
    ] = RunOptions.require_frames
    reconnect_for: Annotated[
        float | None,
        _option(
            min=0,
            metavar="SECONDS",
            help="Try so long to get a lost camera or network stream back; 0: end there. Default: 60. Given, or with "
            "--resume, also at the start.",
        ),
    ] = None
    buffer: Annotated[
        Literal["latest", "all"] | None,
        _option(help="Frames of a live source that count when the model is slower. Default: latest."),
    ] = None
    share: Annotated[
        str | None,
        _option(
            metavar="mean:SHARE",
            help="With --streams: at each save, each stream's weights go this share of the way to the mean of all.",
        ),
    ] = None

    def checked_share(self) -> float:
        """How far each stream goes to the mean of all.

        Raises:
            UsageError: If it is no share, or there is one stream only.
        """
        if self.share is None:
            return RunOptions.share
        if not self.streams:
            raise UsageError("--share is between the streams of --streams")
        kind, _, share = self.share.partition(":")
        try:
            return {"mean": float(share)}[kind]
        except (KeyError, ValueError):
            raise UsageError(f"--share takes mean:SHARE, such as mean:0.1, got {self.share}") from None

    def open(self, source: str, *, resume: bool) -> Stream:
        """The stream of a source's frames."""
        from remtta.streams.sources import open_stream

        return open_stream(
            source,
            sort=self.sort,
            frame_stride=self.frame_stride,
            limit=self.limit,
            null_separated=self.null,
            reconnect_for=self.reconnect_for,
            buffer=self.buffer,
            wait_at_start=self.reconnect_for is not None or resume,
        )

    def open_all(self, source: str, *, resume: bool) -> dict[str, Stream]:
        """The streams of a list of sources, by name; live ones that are not there yet are waited for."""
        from remtta.streams.lists import read_sources
        from remtta.streams.live import LiveOptions
        from remtta.streams.sources import open_streams

        if self.null or self.require_frames:
            raise UsageError("-0 and --require-frames are for paths on standard input, and --streams reads none")
        given = {"reconnect_for": self.reconnect_for, "buffer": self.buffer}
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        live = LiveOptions(**chosen, wait_at_start=True)
        sources = read_sources(Path(source))
        return open_streams(
            sources, sort=self.sort, frame_stride=self.frame_stride, limit=self.limit, live=live, going_on=resume
        )


@dataclass(frozen=True)
class OutputOptions:
    """The run folder, what is in it, and what guards it against harm."""

    output: Annotated[Path | None, _option("--output", "-o", help="Run folder. Default: runs/<UTC time>.")] = None
    overwrite: Annotated[bool, _option("--overwrite", help="Replace an earlier run in the folder.")] = False
    resume: Annotated[
        bool, _option("--resume", help="Go on with the run in --output, if there is one, as if it had not stopped.")
    ] = False
    answer: Annotated[
        Answer | None,
        _option(
            help="Who answers: the adapted model, both (the mean of its and the source model's probabilities), or "
            "auto, weighted by who sees more in the last frames. Default: by the preset, auto or adapted.",
        ),
    ] = None
    smooth: Annotated[
        Smooth,
        _option(help="auto: where frames come in order, as on video, answers go by the frames before, too."),
    ] = RunOptions.smooth
    memory: Annotated[
        int,
        _option(
            min=0,
            metavar="N",
            help="Keep what each of the last N conditions (told by plain statistics of images) has taught, and go on "
            "from that where one comes back; 0: not.",
        ),
    ] = RunOptions.memory
    estimate: Annotated[
        float | None,
        _option(
            metavar="SHARE",
            help="Estimate the accuracy on the last 500 frames, for a model with this one on clean images; "
            "--source-data with some of those, unlabelled, makes it better.",
        ),
    ] = RunOptions.estimate
    expire_below: Annotated[
        float | None,
        _option(metavar="SHARE", help="Tell, by an event and a warning, where the estimate for the answers is below."),
    ] = RunOptions.expire_below
    each: Annotated[bool, _option("--each", help="Write what the adapted and the source model said by themselves.")] = (
        RunOptions.each
    )
    guard: Annotated[
        Action | None,
        _option(
            help="What to do when adaptation does harm: tell, go back to the source weights, or the same and end the "
            "run when the retries are used up. Default: by the preset, rollback or off.",
        ),
    ] = None
    guard_retries: Annotated[int, _option(min=0, help="Rollbacks; the alarm after them ends adaptation.")] = (
        GuardOptions.retries
    )
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

    def guard_options(self, preset: Preset) -> GuardOptions:
        """What --guard, --guard-retries and --answer ask for, or this preset."""
        return GuardOptions(
            action=self.guard or preset.action, answer=self.answer or preset.answer, retries=self.guard_retries
        )


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
    method: MethodOptions, output: OutputOptions, stream: StreamOptions, service: ServiceOptions, *, seed: int
) -> RunOptions:
    """How the stream is run.

    Raises:
        UsageError: If a value is out of range, or two exclude each other.
    """
    guard = output.guard_options(preset_of(method.preset))
    if output.each and guard.answer == "adapted":
        raise UsageError(
            "--each writes what both models said, and only the adapted one answers; add --answer auto or both"
        )
    if output.answer not in (None, "adapted") and not method.adapts:
        _log.warning("--answer %s changes nothing: %s is the source model", output.answer, method.method)
    return RunOptions(
        batch_size=method.shared.batch_size,
        topk=output.topk,
        logits=output.logits,
        each=output.each,
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
        guard=guard,
        adapt=method.adapt,
        smooth=output.smooth,
        memory=output.memory,
        estimate=output.estimate,
        expire_below=output.expire_below,
        share=stream.checked_share(),
        preset=method.preset,
    )
