"""Callbacks: code that sees a run of `adapt`, and may bring options to the command. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from remtta.options import RunOptions

if TYPE_CHECKING:
    from remtta.runs.reading import Row
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary
    from remtta.streams.prefetch import DecodedFrame


@dataclass(frozen=True)
class BatchReport:
    """The results of a batch."""

    frames: Sequence[DecodedFrame]  # its frames, including unreadable ones, without those that were reported early
    rows: Sequence[Row]  # the row of each of these frames in `predictions.jsonl`
    lines: bytes  # all that was added to `predictions.jsonl`: nothing for rows that a resumed run had written before
    guard: str | None  # the guard's state: "trust", "doubt" or "retired"; None without a guard
    summary: RunSummary  # the counts so far


@dataclass(frozen=True)
class PlannedRun:
    """A run that is about to begin; known before torch is loaded."""

    source: str
    folder: Path
    options: RunOptions


class Callback:
    """Sees a run; every hook does nothing by default. What a hook raises ends the run.

    A class that is listed as an entry point of the group `remtta.callbacks` adds its `options` to `remtta adapt`.
    """

    options: ClassVar[type | None] = None
    """Its options of `remtta adapt`: a frozen dataclass whose fields are `Annotated[type, output_option("Help.")]`."""

    @classmethod
    def from_options(cls, options: Any, run: PlannedRun) -> Self | None:
        """Return a callback, or None if the options do not ask for one. Raise UsageError if a path is bad or a package
        is missing: torch is not loaded yet.
        """
        return None

    def on_start(self, run: Run) -> None:
        """Prepare, before the first frame; `run.context` has the model, the stream and the options."""

    def on_batch(self, report: BatchReport) -> None:
        """Take a batch whose rows are on disk, after its update; before it with `latency` and for early predictions."""

    def on_end(self, summary: RunSummary) -> None:
        """Finish; `summary.exit_reason` says why the run ended. Called after a failure, too, if `on_start` returned."""

    def close(self) -> None:
        """Release what the constructor took. `remtta adapt` calls it at its end, even if no run began."""


@contextlib.contextmanager
def following(run: Run, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Start callbacks, and end those that have started in reverse order, whatever happens in the block."""
    with contextlib.ExitStack() as started:
        for callback in callbacks:
            try:
                callback.on_start(run)
            except BaseException as error:
                run.summary.end(error)  # for those that have started
                raise
            started.callback(callback.on_end, run.summary)
        yield
