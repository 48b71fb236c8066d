"""Progress on standard error: a bar on a terminal, otherwise occasional lines."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from remtta.errors import counted

if TYPE_CHECKING:
    from remtta.adapt.stream_group import StreamGroupSummary
    from remtta.corruptions.tree import TreeSummary
    from remtta.runs.summary import RunSummary

SECONDS_BETWEEN_LINES = 30.0

_log = logging.getLogger("remtta")


_Show = Callable[[int, int | None, str, float], None]
"""Shows the number done, the total, a detail, and the rate per second."""


@contextlib.contextmanager
def progress(
    num_frames: int | None, *, hidden: bool, lines: bool = False
) -> Iterator[Callable[[RunSummary | StreamGroupSummary], None]]:
    """Yield a function that shows the counts of a run so far; with `lines`, never as a bar."""
    with _shown("adapting", "frames", hidden, lines) as show:
        yield lambda run: show(run.num_frames, num_frames, counted(run.num_updates, "update"), run.images_per_s)


@contextlib.contextmanager
def tree_progress(*, hidden: bool) -> Iterator[Callable[[TreeSummary], None]]:
    """Yield a function that shows the progress of a tree; `hidden` shows nothing."""
    with _shown("corrupting", "images", hidden) as show:
        yield lambda tree: show(tree.finished, tree.num_images, f"{tree.written} written", tree.images_per_s)


@contextlib.contextmanager
def text_progress(*, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows how many class sentences are embedded; `hidden` shows nothing."""
    started = time.monotonic()
    with _shown("reading class names", "sentences", hidden, rate="sentences") as show:
        yield lambda done, total: show(done, total, "", done / max(1e-9, time.monotonic() - started))


@contextlib.contextmanager
def _shown(doing: str, unit: str, hidden: bool, lines: bool = False, rate: str = "images") -> Iterator[_Show]:
    if hidden:
        yield lambda done, total, detail, images_per_s: None
        return
    if lines or not sys.stderr.isatty():
        yield _Lines(unit, rate)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TextColumn("{task.fields[done]}"), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(TextColumn(doing), *columns, console=console, redirect_stdout=False, transient=True) as bar:
        task = bar.add_task(doing, total=None, done="waiting for the first batch", rate="")

        def show(done: int, total: int | None, detail: str, images_per_s: float) -> None:
            counts = f"{done} {unit}" if total is None else f"{done}/{total}"
            speed = _joined(f"{images_per_s:.1f} {rate}/s", detail)
            bar.update(task, completed=done, total=total, done=counts, rate=speed)

        yield show


class _Lines:
    """Logs a line of counts every half minute."""

    def __init__(self, unit: str, rate: str) -> None:
        self._unit, self._rate = unit, rate
        self._due = time.monotonic() + SECONDS_BETWEEN_LINES

    def __call__(self, done: int, total: int | None, detail: str, images_per_s: float) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + SECONDS_BETWEEN_LINES
            of_all = "" if total is None else f" of {total}"
            _log.info("%s", _joined(f"{done}{of_all} {self._unit}", detail, f"{images_per_s:.1f} {self._rate}/s"))


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))
