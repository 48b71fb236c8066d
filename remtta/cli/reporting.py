"""Shared by all commands: messages, progress, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

import typer

from remtta.errors import CheckpointError, DeltaError, RemttaError, UsageError
from remtta.files import to_json
from remtta.interrupts import Interrupts, Stopped
from remtta.runs.reading import printable

if TYPE_CHECKING:
    pass

EXIT_CODES: dict[type[RemttaError], int] = {UsageError: 2, CheckpointError: 4, DeltaError: 4}
_FAILURE = 1
_SIGNAL_BASE = 128

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
        with messages(level, as_json=as_json), interrupts:
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
def messages(level: int, *, as_json: bool = False) -> Iterator[None]:
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
