"""Shared by all commands: messages, one-line errors, exit codes."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TextIO

import typer

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import CheckpointError, DeltaError, RemttaError, UsageError
from remtta.runs.reading import printable

EXIT_CODES: dict[type[RemttaError], int] = {UsageError: 2, CheckpointError: 4, DeltaError: 4}
_FAILURE = 1
_SIGNAL_BASE = 128


class _StderrHandler(logging.Handler):
    """Writes to the current sys.stderr, so that a progress bar can make room."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        if self._as_json:
            _write_json_line(record.levelname, record.getMessage())
            return
        prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.capitalize()}: "
        _write(f"{prefix}{printable(record.getMessage())}")


def say(text: str, level: str = "info", *, as_json: bool = False, **more: object) -> None:
    """Write a command's own message to standard error: as printable lines, or as JSON Lines with more fields."""
    if as_json:
        _write_json_line(level, text, **more)
    else:
        _write("\n".join(map(printable, text.split("\n"))))


def _write_json_line(level: str, message: str, **more: object) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    _write(json.dumps({"time": now, "level": level.lower(), "message": message, **more}))


def _write(line: str) -> None:
    """Write a line to standard error; if nobody can read it, do without messages rather than end a run."""
    try:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    except OSError:
        discard(sys.stderr)


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
        say(f"stopped by {stop}", "warning", as_json=as_json)
        raise typer.Exit(_SIGNAL_BASE + stop.signum) from None
    except BrokenPipeError:
        discard(sys.stdout)
        raise typer.Exit(0) from None
    except Exception as error:
        if as_json:
            more = {"traceback": traceback.format_exc()} if debug else {}
            say(_error_text(error, debug), "error", as_json=True, **more)
        else:
            if debug:
                traceback.print_exc()
            say(f"Error: {_error_text(error, debug)}")
        code = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), _FAILURE)
        raise typer.Exit(code) from None


@contextlib.contextmanager
def _messages(level: int, *, as_json: bool) -> Iterator[None]:
    """Send the package's messages to standard error, and show other libraries' warnings only with --verbose."""
    log = logging.getLogger("remtta")
    earlier = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [_StderrHandler(as_json=as_json)], False
    log.setLevel(level)
    try:
        with warnings.catch_warnings(action="ignore" if level > logging.DEBUG else None):
            yield
    finally:
        log.handlers, log.propagate = earlier[:2]
        log.setLevel(earlier[2])


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


def discard(output: TextIO) -> None:
    """Redirect a standard stream to the null device, so that Python's flush at exit cannot fail on it."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), output.fileno())


def print_version(wanted: bool) -> None:
    """Print the versions of remtta, torch and timm and the device in one line, for `--version`."""
    if not wanted:
        return
    from importlib.metadata import version

    import torch

    from remtta._version import __version__
    from remtta.models.loading import select_device

    timm = version("timm")  # importing it takes as long as torch
    typer.echo(f"remtta {__version__}, torch {torch.__version__}, timm {timm}, {select_device('auto')}")
    raise typer.Exit
