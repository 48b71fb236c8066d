"""`remtta adapt LIST --streams`: many streams on one model. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from remtta.cli.adapt import AdaptCommand, AdaptRunner
from remtta.cli.progress import progress
from remtta.cli.running import RunningOptions
from remtta.deployment.group_callback import GroupCallback
from remtta.errors import UsageError, check_installed, counted
from remtta.options.option import option_fields, output_option, stream_option
from remtta.options.run_options import Engine
from remtta.runs.callbacks import Callback
from remtta.runs.folder import run_folder

if TYPE_CHECKING:
    from remtta.deployment.stream_group import StreamGroup, StreamGroupSummary
    from remtta.streams.sources import Stream


@dataclass(frozen=True)
class StreamsOptions:
    """Many streams, and the workers among which they are divided."""

    streams: Annotated[
        bool,
        stream_option(
            "SOURCE is a file with one name=address per line; the streams share one model. Missing cameras are "
            "waited for.",
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


class ManyStreams(AdaptRunner):
    """Runs over the streams of a list, if --streams is set."""

    options = StreamsOptions

    @staticmethod
    def execute(options: StreamsOptions, command: AdaptCommand) -> StreamGroupSummary | None:
        divides = options.jobs > 1 or options.engine != "processes"
        if not options.streams:
            if divides:
                raise UsageError("--jobs and --engine divide the streams of a list; add --streams, or leave them out")
            return None
        if command.files.predictions:
            raise UsageError("--predictions - is for one stream; with --streams, follow each run's predictions.jsonl")
        if options.engine == "ray":
            check_installed("ray", "cluster", "--engine ray")
        from remtta.deployment.stream_lists import check_group_folder, open_streams, read_sources

        run = command.run
        streams = open_streams(read_sources(Path(command.source)), command.stream, resuming=run.resume)
        with run_folder(command.files.output) as folder, contextlib.ExitStack() as stack:
            callbacks = _for_groups(stack.enter_context(command.callbacks(command.source, folder)))
            check_group_folder(folder, streams, overwrite=run.overwrite, resume=run.resume)
            classifier, config = command.load(folder, default_threads=1 if divides else None)
            from remtta.deployment.many_streams import adapt_streams

            return adapt_streams(
                classifier,
                streams,
                folder,
                config,
                engine=options.engine,
                jobs=options.jobs,
                callbacks=[*callbacks, _Progress(streams, command.running)],
                interrupts=command.interrupts,
            )


def _for_groups(callbacks: Sequence[Callback]) -> list[GroupCallback]:
    """Return the callbacks; raise UsageError, naming its option, if one is for a single stream."""
    for callback in callbacks:
        if not isinstance(callback, GroupCallback):
            assert callback.options is not None  # it was made from them
            option = option_fields(callback.options)[0].flag
            raise UsageError(f"{option} is for one stream; leave it out with --streams")
    return [callback for callback in callbacks if isinstance(callback, GroupCallback)]


class _Progress(GroupCallback):
    """Shows the counts over all streams so far on standard error."""

    def __init__(self, streams: Mapping[str, Stream], running: RunningOptions) -> None:
        counts = [stream.num_frames for stream in streams.values()]
        known = [count for count in counts if count is not None]
        self._num_frames = sum(known) if len(known) == len(counts) else None
        self._running, self._shown = running, contextlib.ExitStack()

    def on_group_start(self, group: StreamGroup) -> None:
        shown = progress("adapting", "frames", hidden=self._running.quiet, lines=self._running.as_json)
        self._show = self._shown.enter_context(shown)

    def on_group_batch(self, summary: StreamGroupSummary) -> None:
        updates = counted(summary.num_updates, "update")
        self._show(summary.num_frames, self._num_frames, updates, summary.images_per_s)

    def on_group_end(self, summary: StreamGroupSummary) -> None:
        self._shown.close()
