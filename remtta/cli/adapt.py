"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import typer

from remtta.cli.parameters import option_names
from remtta.cli.progress import ProgressBar
from remtta.cli.reporting import discard_output, one_line, print_message, signal_exit_code
from remtta.cli.running import RunningOptions, load_start, load_torch
from remtta.errors import UsageError
from remtta.extensions import Extension, usable
from remtta.interrupts import Interrupts
from remtta.methods.settings.chosen import MethodOptions, default_method
from remtta.methods.table import METHOD_TABLE
from remtta.options import DEFAULT_MODEL, ModelOptions, RunOptions, StreamOptions
from remtta.options.option import OptionGroups, output_folder, output_option
from remtta.runs.callbacks import Callback, PlannedRun
from remtta.runs.folder import check_folder, check_same_model, run_folder
from remtta.runs.pipe import RowPipe

if TYPE_CHECKING:
    from torch import nn

    from remtta.pipeline.build import AdaptationConfig

_FAILURE, _STOPPED_BY_GUARD = 1, 5
_log = logging.getLogger(__name__)


class Summary(Protocol):
    """The final report of a command."""

    @property
    def output(self) -> Path:
        """The folder of the results."""

    @property
    def exit_reason(self) -> str:
        """Why the run ended: "completed", a signal's name, "closed pipe", "guard", or "error: ..."."""

    @property
    def signum(self) -> int | None:
        """The signal that stopped it, if any."""

    @property
    def num_frames(self) -> int:
        """Number of frames seen."""

    def figures(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""

    def report(self) -> str:
        """Return a few lines of text for the user."""


@dataclass(frozen=True)
class OutputOptions:
    """Options of the results."""

    output: Annotated[Path | None, output_folder(more="files.md#the-run-folder")] = None
    predictions: Annotated[
        str | None, output_option("Also write predictions to standard output, as JSON Lines.", metavar="-", common=True)
    ] = None

    def check(self, run: RunOptions) -> None:
        """Raise UsageError if options are incompatible, before any work."""
        if self.predictions not in (None, "-"):
            raise UsageError("--predictions takes -; the file is always predictions.jsonl in the run folder")
        if self.predictions and sys.stdout is None:
            raise UsageError("--predictions - needs standard output, which is closed")
        if run.resume and self.output is None:
            raise UsageError("--resume continues the run in a folder; name it with --output")


@dataclass(frozen=True)
class AdaptCommand:
    """A command line of `remtta adapt`."""

    source: str
    stream: StreamOptions
    model: ModelOptions
    method: MethodOptions
    run: RunOptions
    files: OutputOptions
    running: RunningOptions
    interrupts: Interrupts
    makers: Sequence[Callable[[PlannedRun], Callback | None]]  # of the callbacks; see `Callback.from_options`

    def execute(self) -> Summary:
        """Adapt the model to one stream. Checks without torch come first: a wrong path is reported at once."""
        from remtta.streams.sources import open_with

        run, base = self.run, self.model.name or (DEFAULT_MODEL if self.method.shared.delta is None else None)
        frames = open_with(self.source, self.stream, wait_at_start=self.stream.live is not None or run.resume)
        with run_folder(self.files.output) as folder:
            check_folder(folder, overwrite=run.overwrite, resume=run.resume)
            if run.resume and base is not None:
                check_same_model(folder, base)
            with self.callbacks(frames.name, folder) as callbacks:
                classifier, config = self.load(folder)
                from remtta.adapt.one_stream import adapt_stream

                pipe = [RowPipe(sys.stdout.buffer)] if self.files.predictions else []
                progress = ProgressBar(hidden=self.running.quiet, lines=self.running.as_json)
                return adapt_stream(
                    classifier,
                    frames,
                    folder,
                    method=config.method,
                    config=config.config,
                    options=config.options,
                    delta=config.delta,
                    source_data=config.source_data,
                    callbacks=[*pipe, *callbacks, progress],
                    interrupts=self.interrupts,
                )

    @contextlib.contextmanager
    def callbacks(self, source: str, folder: Path) -> Iterator[list[Callback]]:
        """Make the callbacks that the options ask for, and close them after the block."""
        planned, made = PlannedRun(source, folder, self.run), list[Callback]()
        with contextlib.ExitStack() as stack:
            for make in self.makers:
                if callback := make(planned):
                    stack.callback(callback.close)
                    made.append(callback)
            yield made

    def load(self, folder: Path, default_threads: int | None = None) -> tuple[nn.Module, AdaptationConfig]:
        """Load torch, the starting delta and the classifier; return the classifier and how it is adapted."""
        model, method, run = self.model, self.method, self.run
        delta, source_data = method.shared.delta, method.shared.source_data
        name = method.method or default_method(model.name)
        if (method.method or delta is None) and METHOD_TABLE[name].config_class is not None:
            method.config(run.batch_size, model.name)  # refuses wrong settings before torch is loaded
        load_torch("remtta.adapt.one_stream", model, delta)
        from remtta.methods.source_data import check_source_data
        from remtta.pipeline.build import AdaptationConfig

        start = load_start(delta, folder, overwrite=run.overwrite)
        base = model.name or (start.model if start else None)
        name, settings = method.method or default_method(base), method.config(run.batch_size, base)
        check_source_data([name], source_data, calibrates=run.estimate is not None)
        self.running.set_threads(default_threads)
        return self.running.load_classifier(model, start), AdaptationConfig(name, settings, run, start, source_data)


class AdaptRunner(abc.ABC):
    """Executes `remtta adapt` in place of `AdaptCommand.execute`, if its options ask for it: over many streams, say.

    It is listed among the callbacks, whose options it reads as well.
    """

    options: ClassVar[type]
    """Its options of `remtta adapt`, as of a callback."""

    @staticmethod
    @abc.abstractmethod
    def execute(options: Any, command: AdaptCommand) -> Summary | None:
        """Return the summary; None, before any work, if the options do not ask for it."""


_GROUPS = (StreamOptions, ModelOptions, MethodOptions, RunOptions, OutputOptions, RunningOptions)


@functools.cache
def find_callbacks() -> dict[str, type[Callback] | type[AdaptRunner]]:
    """Return the callbacks of remtta's parts and of other packages by name; warn of those that cannot be used."""
    taken = {name for group in _GROUPS for name in option_names(group)}
    found, reasons = usable("callbacks", lambda extension: _checked(extension, taken))
    for reason in reasons:
        _log.warning("%s", one_line(reason))
    return found


def _checked(extension: Extension, taken: set[str]) -> type[Callback] | type[AdaptRunner]:
    """Return a callback, and add its options to those taken; raise TypeError if it is none, or its options are not a
    dataclass; UsageError if their names are taken.
    """
    found = extension.load()
    if not (isinstance(found, type) and issubclass(found, Callback | AdaptRunner) and is_dataclass(found.options)):
        raise TypeError("it must be a subclass of remtta.Callback whose options are a dataclass")
    extension.take_names(option_names(found.options), taken)
    return found


def _option_groups() -> dict[str, type]:
    return {name: callback.options for name, callback in find_callbacks().items() if callback.options}


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
    files: OutputOptions,
    options: Annotated[Mapping[str, Any], OptionGroups(_option_groups)],
    running: RunningOptions,
) -> None:
    """Predict every frame of SOURCE, and adapt the model to the frames.

    Writes to the run folder: predictions.jsonl; delta.safetensors, the change of
    weights; run.json, settings and counts; events.jsonl, decisions of the guard;
    state.safetensors, for --resume.

    Examples:

      remtta adapt ./frames --model vit_base_patch16_224

      remtta adapt clip.mp4 --model vit_small_patch16_224 --checkpoint vit.pth

      ls -v *.jpg | remtta adapt - --predictions - | jq --unbuffered .label
    """
    with running.command() as interrupts:
        files.check(run)
        makers = [
            partial(each.from_options, options[name])
            for name, each in find_callbacks().items()
            if issubclass(each, Callback)
        ]
        command = AdaptCommand(source, stream, model, method, run, files, running, interrupts, makers)
        runners = ((each, options[name]) for name, each in find_callbacks().items() if issubclass(each, AdaptRunner))
        instead = (runner.execute(given, command) for runner, given in runners)
        summary = next(filter(None, instead), None) or command.execute()
        _report(summary, files, running)
    if summary.exit_reason == "guard":
        raise typer.Exit(_STOPPED_BY_GUARD)
    raise typer.Exit(_FAILURE if summary.exit_reason.startswith("error") else signal_exit_code(summary.signum))


def _report(summary: Summary, files: OutputOptions, running: RunningOptions) -> None:
    """Print the summary; print the path of a folder that the user did not name to standard output."""
    if summary.exit_reason == "closed pipe":
        discard_output(sys.stdout)
    if running.quiet or (summary.exit_reason == "completed" and not summary.num_frames):
        return
    if running.as_json:
        print_message(summary.report().partition("\n")[0], as_json=True, **summary.figures())
    else:
        print_message(summary.report())
    if files.output is None and files.predictions is None and summary.output.exists():
        typer.echo(str(summary.output))
