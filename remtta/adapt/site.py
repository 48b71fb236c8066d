"""The runs of many streams as one: what they came to, and what is told of them meanwhile."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from remtta.files import FolderLock, write_json, writing
from remtta.runs.folder import SITE
from remtta.runs.record import Plan
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from remtta.streams.sources import Stream
from remtta.watching.health import vitals
from remtta.watching.metrics import Sample, sample

StreamReport = Mapping[str, Any]
"""What there is to tell of a stream: `summary`, `vitals` and `metrics`, which JSON can hold."""


@dataclass(frozen=True)
class SiteSummary:
    """What the runs of a site came to.

    Attributes:
        output: The site's folder.
        streams: What each run came to, by its stream's name.
    """

    output: Path
    streams: Mapping[str, RunSummary]

    @property
    def signum(self) -> int | None:
        """The signal that stopped it, if one did."""
        return next((run.signum for run in self.streams.values() if run.signum is not None), None)

    @property
    def exit_reason(self) -> str:
        """ "running", "completed", a signal's name, "error: ..." or "guard": of several that which matters most."""
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
        """Frames seen, of all streams."""
        return sum(run.num_frames for run in self.streams.values())

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken."""
        return sum(run.num_updates for run in self.streams.values())

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, of all streams and all parts of their runs."""
        seconds = max((run.seconds for run in self.streams.values()), default=0.0)
        return sum(run.num_predicted for run in self.streams.values()) / seconds if seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """What the report says, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "streams": {name: run.figures() for name, run in self.streams.items()},
        }

    def report(self) -> str:
        """A line for each stream, for a person."""
        width = max(map(len, self.streams))
        lines = [f"{name:<{width}}  {run.report().partition(chr(10))[0]}" for name, run in self.streams.items()]
        return "\n".join([*lines, str(self.output / SITE)])


class Site(abc.ABC):
    """The runs of many streams.

    Args:
        folder: Where their folders are.
        streams: What they read, by name.
        runs: What each has come to.
    """

    def __init__(self, folder: Path, streams: Mapping[str, Stream], runs: Mapping[str, RunSummary]) -> None:
        self.folder, self._streams = folder, streams
        self.summary = SiteSummary(folder, runs)

    @abc.abstractmethod
    def execute(self) -> None:
        """Run them all to their ends.

        Raises:
            OutputError: If `site.json` cannot be written.
        """

    @abc.abstractmethod
    def reports(self) -> Mapping[str, StreamReport]:
        """How each stream is, at any moment and from any thread."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Have the folder for this process alone, made if need be; one that was made for nothing is removed again."""
        made = not self.folder.exists()
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.folder)
        try:
            yield
        finally:
            lock.release()
            if made:
                with contextlib.suppress(OSError):  # there is something in it
                    self.folder.rmdir()

    def vitals(self) -> dict[str, Any]:
        """What the health file says."""
        streams = {name: report["vitals"] for name, report in self.reports().items()}
        return {"state": self.summary.exit_reason.partition(":")[0], "streams": streams}

    def samples(self) -> dict[str, Sample]:
        """What the metrics say."""
        return {name: report["metrics"] for name, report in self.reports().items()}

    def write(self) -> None:
        """Replace `site.json`.

        Raises:
            OutputError: If the disk refuses.
        """
        streams = {
            name: {"source": self._streams[name].name, "kind": self._streams[name].kind, **run.figures()}
            for name, run in self.summary.streams.items()
        }
        write_json(self.folder / SITE, {"exit_reason": self.summary.exit_reason, "streams": streams})


def report_of(plan: Plan, run: Run) -> StreamReport:
    """What there is to tell of a run."""
    summary, record = run.summary, run.record
    content = {**asdict(summary), "output": str(summary.output)}
    return {
        "summary": content,
        "vitals": vitals(plan, summary, record),
        "metrics": sample(plan, summary, record),
    }
