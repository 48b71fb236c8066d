"""Rows on a pipe, such as standard output, as soon as they are on disk. Imports no torch."""

from __future__ import annotations

import io
import logging
import math
import os
import select
import time
from typing import TYPE_CHECKING, BinaryIO

from remtta.errors import OutputError
from remtta.interrupts import Interrupts
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.folder import PREDICTIONS

if TYPE_CHECKING:
    from remtta.runs.run import Run

PATIENCE_S = 2.0  # for the reader to take the rest, after a signal
_POLL_S = 0.1

_log = logging.getLogger("remtta")


class ReaderGone(Exception):
    """The reader of standard output closed the pipe."""


class RowPipe(Callback):
    """Sends the rows of a run down a pipe, which stays open. A blocked reader is waited for until `PATIENCE_S` after a
    signal.

    Raises:
        ReaderGone: If the reader closed the pipe, which ends the run well; the file has every row.
        Stopped: If a signal has arrived, and the reader closed the pipe or did not take all of it in time.
        OutputError: If it fails for another reason.
    """

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe

    def on_start(self, run: Run) -> None:
        self._interrupts = run.interrupts
        if run.context.earlier is not None:  # a reader that stopped may have lost rows
            _log.info("earlier rows are not sent again; %s has them all", run.summary.output / PREDICTIONS)

    def on_batch(self, report: BatchReport) -> None:
        try:
            _send(self._pipe, report.lines, self._interrupts)
        except BrokenPipeError as error:
            self._interrupts.stop_now()  # Ctrl-C in a pipeline ends the reader, too
            raise ReaderGone from error
        except OSError as error:
            raise OutputError(
                f"the predictions cannot be written to standard output: {error.strerror or error}"
            ) from error


def _send(pipe: BinaryIO, data: bytes, interrupts: Interrupts) -> None:
    """Write to a pipe in parts that never block, so that signals are handled even if the reader is stuck."""
    raw = pipe.raw if isinstance(pipe, io.BufferedWriter) else pipe
    if not isinstance(raw, io.FileIO) or os.name == "nt":  # where select supports only sockets
        pipe.write(data)
        pipe.flush()
        return
    pipe.flush()
    descriptor, view, deadline = raw.fileno(), memoryview(data), math.inf
    while view:
        if interrupts.pending:
            deadline = min(deadline, time.monotonic() + PATIENCE_S)
        if time.monotonic() > deadline:
            interrupts.stop_now()
        if select.select([], [descriptor], [], _POLL_S)[1]:
            view = view[os.write(descriptor, view[: select.PIPE_BUF]) :]
