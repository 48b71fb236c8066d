"""The runs of many streams together: their summary and their state."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from remtta.engines.interrupts import Interrupts
from remtta.files import FolderLock, remove_leftovers, write_json
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.folder import SITE
from remtta.runs.summary import RunSummary
from remtta.streams.sources import Stream
from remtta.watching.metrics import Sample

StreamReport = Mapping[str, Any]
"""A report on a stream: `summary`, `vitals` and `metrics`, which JSON can represent."""


@dataclass(frozen=True)
class StreamGroupSummary:
    """Summary of the runs of many streams."""

    output: Path  # parent of the streams' folders
    streams: Mapping[str, RunSummary]  # summary of each run by its stream's name

    @property
    def signum(self) -> int | None:
        """The signal that stopped the runs, if any."""
        return next((run.signum for run in self.streams.values() if run.signum is not None), None)

    @property
    def exit_reason(self) -> str:
        """The streams' most important reason: "running", "completed", a signal's name, "error: ..." or "guard"."""
        reasons = [run.exit_reason for run in self.streams.values()]
        failed = sum(reason.startswith("error") for reason in reasons)
        stopped = next((run.exit_reason for run in self.streams.values() if run.signum is not None), None)
        if "running" in reasons or stopped:
            return stopped or "running"
        if failed:
            return f"error: {failed} of {len(reasons)} streams failed"
        return "guard" if "guard" in reasons else "completed"

    @property
    def num_frames(self) -> int:
        """Number of frames seen, over all streams."""
        return sum(run.num_frames for run in self.streams.values())

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps taken."""
        return sum(run.num_updates for run in self.streams.values())

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, over all streams and all parts of their runs."""
        seconds = max((run.seconds for run in self.streams.values()), default=0.0)
        return sum(run.num_predicted for run in self.streams.values()) / seconds if seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "streams": {name: run.figures() for name, run in self.streams.items()},
        }

    def report(self) -> str:
        """Return one line per stream for the user."""
        width = max(map(len, self.streams))
        lines = [f"{name:<{width}}  {run.report().partition(chr(10))[0]}" for name, run in self.streams.items()]
        again = [f"continue with --output {self.output} --resume"] if self.signum else []
        return "\n".join([*lines, str(self.output / SITE), *again])


@dataclass(frozen=True)
class StreamGroupConfig:
    """The settings of a group of streams."""

    model: nn.Module  # at its source weights
    streams: Mapping[str, Stream]
    folder: Path  # parent of the streams' folders
    setup: AdaptationConfig
    interrupts: Interrupts
    on_batch: Callable[[StreamGroupSummary], None] | None = None  # called after every batch, or from time to time


class StreamGroup(abc.ABC):
    """The runs of many streams."""

    def __init__(self, config: StreamGroupConfig, runs: Mapping[str, RunSummary]) -> None:
        self._config, self.folder = config, config.folder
        self.summary = StreamGroupSummary(config.folder, runs)

    @abc.abstractmethod
    def execute(self) -> None:
        """Run all streams to their ends."""

    @abc.abstractmethod
    def reports(self) -> Mapping[str, StreamReport]:
        """Return a report on each stream; can be called at any time from any thread."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; create the folder if needed, and remove it again if it stays empty."""
        made = not self.folder.exists()
        lock = FolderLock(self.folder)
        remove_leftovers(self.folder, (SITE,))
        try:
            yield
        finally:
            lock.release()
            if made:
                with contextlib.suppress(OSError):  # there is something in it
                    self.folder.rmdir()

    def vitals(self) -> dict[str, Any]:
        """Return the content of the health file."""
        streams = {name: report["vitals"] for name, report in self.reports().items()}
        return {"state": self.summary.exit_reason.partition(":")[0], "streams": streams}

    def samples(self) -> dict[str, Sample]:
        """Return the values for the metrics."""
        return {name: report["metrics"] for name, report in self.reports().items()}

    def write(self) -> None:
        """Replace `site.json`."""
        streams = {
            name: {"source": stream.name, "kind": stream.kind, **self.summary.streams[name].figures()}
            for name, stream in self._config.streams.items()
        }
        write_json(self.folder / SITE, {"exit_reason": self.summary.exit_reason, "streams": streams})
