"""Progress on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remtta.adapt import RunSummary

SECONDS_BETWEEN_LINES = 30.0

_log = logging.getLogger("remtta")


@contextlib.contextmanager
def progress(num_frames: int | None, *, hidden: bool) -> Iterator[Callable[[RunSummary], None]]:
    """Yield a function that shows the counts of a run so far.

    Args:
        num_frames: How many frames there will be, if known.
        hidden: Show nothing.
    """
    if hidden:
        yield lambda summary: None
        return
    if not sys.stderr.isatty():
        yield _Lines(num_frames)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("adapting"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False, transient=True) as bar:
        task = bar.add_task("adapting", total=num_frames, rate="")

        def advance(summary: RunSummary) -> None:
            rate = f"{summary.images_per_s:.1f} images/s, {summary.num_updates} updates"
            bar.update(task, completed=summary.num_frames, rate=rate)

        yield advance


class _Lines:
    """A line of counts every half minute, for logs."""

    def __init__(self, num_frames: int | None) -> None:
        self._total = "" if num_frames is None else f" of {num_frames}"
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def __call__(self, summary: RunSummary) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_BETWEEN_LINES
            _log.info(
                "%d%s frames, %d updates, %.1f images/s",
                summary.num_frames,
                self._total,
                summary.num_updates,
                summary.images_per_s,
            )
