"""The progress bar: on standard error, on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from remtta.adapt import RunSummary


@contextlib.contextmanager
def progress(num_frames: int | None, *, hidden: bool) -> Iterator[Callable[[RunSummary], None]]:
    """Yield a function that shows the counts of a run so far.

    Args:
        num_frames: How many frames there will be, if known.
        hidden: Show nothing.
    """
    if hidden or not sys.stderr.isatty():
        yield lambda summary: None
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
