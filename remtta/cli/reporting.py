"""Shared by all commands: messages, progress, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

import typer

from remtta.errors import CheckpointError, DeltaError, RemttaError, UsageError, counted
from remtta.files import to_json
from remtta.interrupts import Interrupts, Stopped
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.reading import printable

if TYPE_CHECKING:
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

EXIT_CODES: dict[type[RemttaError], int] = {UsageError: 2, CheckpointError: 4, DeltaError: 4}
_FAILURE = 1
_SIGNAL_BASE = 128
SECONDS_BETWEEN_LINES = 30.0  # of progress

ShowProgress = Callable[[int, int | None, str, float], None]
"""Shows the number done, the total, a detail, and the rate per second."""

_log = logging.getLogger(__name__)


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, so that a progress bar can make room."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno < logging.WARNING or self._as_json else f"{record.levelname.capitalize()}: "
        text = record.getMessage() if self._as_json else printable(record.getMessage())
        print_message(prefix + text, record.levelname.lower(), as_json=self._as_json)


def print_message(text: str, level: str = "info", *, as_json: bool = False, **fields: object) -> None:
    """Print a message to standard error: as lines of text, or as one JSON line with more fields; if it is closed, drop
    all messages instead of ending the run.
    """
    if as_json:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = to_json({"time": now, "level": level, "message": text, **fields}, allow_nan=True)
    else:
        line = "\n".join(map(printable, text.split("\n")))
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        discard_output(sys.stderr)


@contextlib.contextmanager
def command(
    *, verbose: bool = False, quiet: bool = False, debug: bool = False, as_json: bool = False
) -> Iterator[Interrupts]:
    """Run a command's body: set up messages and signals, turn errors into one line and an exit code."""
    interrupts = Interrupts()
    try:
        if quiet and verbose:
            raise UsageError("--quiet and --verbose exclude each other")
        level = logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO
        with _messages(level, as_json=as_json), interrupts:
            yield interrupts
    except (typer.Exit, typer.Abort):
        raise
    except Stopped as stop:
        print_message(f"stopped by {stop}", "warning", as_json=as_json)
        raise typer.Exit(_SIGNAL_BASE + stop.signum) from None
    except BrokenPipeError:
        discard_output(sys.stdout)
        raise typer.Exit(0) from None
    except Exception as error:
        if as_json:
            fields = {"traceback": traceback.format_exc()} if debug else {}
            print_message(_error_text(error, debug), "error", as_json=True, **fields)
        else:
            if debug:
                traceback.print_exc()
            print_message(f"Error: {_error_text(error, debug)}")
        code = next((code for error_type, code in EXIT_CODES.items() if isinstance(error, error_type)), _FAILURE)
        raise typer.Exit(code) from None


@contextlib.contextmanager
def _messages(level: int, *, as_json: bool) -> Iterator[None]:
    """Send the package's messages to standard error, and show other libraries' warnings only with --verbose."""
    logger = logging.getLogger("remtta")
    handlers, propagate, previous_level = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [_StderrHandler(as_json=as_json)], False
    logger.setLevel(level)
    try:
        with warnings.catch_warnings(action="ignore" if level > logging.DEBUG else None):
            yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(previous_level)


def one_line(text: str) -> str:
    """Return a text in one line, without control sequences."""
    return printable(" ".join(text.split()))


def _error_text(error: Exception, debug: bool) -> str:
    text = one_line(str(error))
    if isinstance(error, RemttaError):
        return text
    if isinstance(error, OSError) and error.filename:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # errors of files name them
        return f"standard output cannot be written: {error.strerror}"
    advice = "" if debug else " (--debug shows where)"
    return f"{type(error).__name__}: {text}{advice}"


def signal_exit_code(signum: int | None) -> int:
    """Return 128 plus the signal that ended a run, or 0."""
    return 0 if signum is None else _SIGNAL_BASE + signum


def open_standard_descriptors() -> None:
    """Open the null device for missing standard descriptors.

    Otherwise the first files opened would take their numbers, and receive output meant for the terminal.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process


def discard_output(output: TextIO) -> None:
    """Redirect a standard stream to the null device, so that Python's flush at exit cannot fail on it."""
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), output.fileno())


def print_version(requested: bool) -> None:
    """Print the versions of remtta, torch and timm and the device in one line, for `--version`."""
    if not requested:
        return
    from importlib.metadata import version

    import torch

    from remtta._version import __version__
    from remtta.models.loading import select_device

    timm = version("timm")  # importing it takes as long as torch
    typer.echo(f"remtta {__version__}, torch {torch.__version__}, timm {timm}, {select_device('auto')}")
    raise typer.Exit


class ProgressBar(Callback):
    """Shows the counts of a run so far on standard error; with `lines`, never as a bar."""

    def __init__(self, *, hidden: bool, lines: bool = False) -> None:
        self._hidden, self._lines = hidden, lines

    def on_start(self, run: Run) -> None:
        self._num_frames, self._shown = run.context.stream.num_frames, contextlib.ExitStack()
        self._show = self._shown.enter_context(progress("adapting", "frames", hidden=self._hidden, lines=self._lines))

    def on_batch(self, report: BatchReport) -> None:
        run = report.summary
        self._show(run.num_frames, self._num_frames, counted(run.num_updates, "update"), run.images_per_s)

    def on_end(self, summary: RunSummary) -> None:
        self._shown.close()


@contextlib.contextmanager
def progress(
    activity: str, unit: str, *, hidden: bool, lines: bool = False, rate_unit: str = "images"
) -> Iterator[ShowProgress]:
    """Yield a function that shows progress on standard error: a bar on a terminal, otherwise occasional lines."""
    if hidden:
        yield lambda done, total, detail, rate: None
        return
    if lines or not sys.stderr.isatty():
        yield _progress_lines(unit, rate_unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TextColumn("{task.fields[done]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(TextColumn(activity), *columns, console=console, redirect_stdout=False, transient=True) as bar:
        task = bar.add_task(activity, total=None, done="waiting for the first batch", rate="")

        def show(done: int, total: int | None, detail: str, rate: float) -> None:
            counts = f"{done} {unit}" if total is None else f"{done}/{total}"
            speed = f"{rate:.1f} {rate_unit}/s" + (f", {detail}" if detail else "")
            bar.update(task, completed=done, total=total, done=counts, rate=speed)

        yield show


def _progress_lines(unit: str, rate_unit: str) -> ShowProgress:
    """Return a function that logs the counts at most every half minute."""
    next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES

    def show(done: int, total: int | None, detail: str, rate: float) -> None:
        nonlocal next_line_at
        if time.monotonic() >= next_line_at:
            next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
            counts = f"{done} {unit}" if total is None else f"{done} of {total} {unit}"
            _log.info("%s%s, %.1f %s/s", counts, f", {detail}" if detail else "", rate, rate_unit)

    return show
