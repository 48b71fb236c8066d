"""Progress on standard error: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from remtta.errors import counted
from remtta.runs.callbacks import BatchReport, Callback

if TYPE_CHECKING:
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

SECONDS_BETWEEN_LINES = 30.0  # of progress

ShowProgress = Callable[[int, int | None, str, float], None]
"""Shows the number done, the total, a detail, and the rate per second."""

_log = logging.getLogger(__name__)


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
