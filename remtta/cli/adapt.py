"""`remtta adapt`: predict and adapt, frame after frame."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Annotated, Any

import typer

from remtta.cli.adapt_command import AdaptCommand, AdaptRunner, OutputOptions, Summary
from remtta.cli.parameters import option_names
from remtta.cli.reporting import discard_output, one_line, print_message, signal_exit_code
from remtta.cli.running import RunningOptions
from remtta.extensions import Extension, usable
from remtta.methods.settings.chosen import MethodOptions
from remtta.options import ModelOptions, RunOptions, StreamOptions
from remtta.options.option import OptionGroups
from remtta.runs.callbacks import Callback

_FAILURE, _STOPPED_BY_GUARD = 1, 5
_log = logging.getLogger(__name__)
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
