"""A small file with a run's state, for a watchdog. Imports no torch, so that a bad path is reported at once."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from remtta.deployment.group_callback import GroupCallback
from remtta.errors import OutputError, UsageError
from remtta.files import remove_leftovers, to_json, write_atomically, writing
from remtta.options.option import output_option
from remtta.runs.callbacks import PlannedRun
from remtta.runs.folder import OWN_FILES

if TYPE_CHECKING:
    from remtta.deployment.stream_group import StreamGroup, StreamGroupSummary
    from remtta.runs.run import Run
    from remtta.runs.summary import RunSummary

EVERY_S = 2.0
_MAX_BYTES = 65_536  # far more than it ever holds


def check_health_path(path: Path, folder: Path) -> None:
    """Raise UsageError, before any work, if the health file's folder does not exist, it is one of the run's own files,
    it has another suffix than .json in the run's folder (which need not exist yet), or another kind of file is there.
    """
    parent = _target(path).parent
    within = parent == Path(os.path.realpath(folder))
    if within and path.name in OWN_FILES:
        raise UsageError(f"--health: {path} is a file of the run; choose another name")
    if within and path.suffix != ".json":
        raise UsageError(f"--health: {path} is in the run's folder, where its name must end in .json")
    if not (within or parent.is_dir()):
        raise UsageError(f"--health: {parent}: no such folder; make it first")
    if path.is_dir():
        raise UsageError(f"--health: {path} is a folder; name a file")
    if path.exists() and not _is_health_file(path):
        raise UsageError(f"--health: {path} is not a health file, and would be replaced; name another file")


def _target(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike Path.resolve, copes with circular links


def _is_health_file(path: Path) -> bool:
    """Return whether a path is an empty file, or one that `HealthFile` wrote."""
    if not path.is_file():
        return False
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES)
        content = json.loads(text or '{"time": "", "state": ""}')
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and {"time", "state"} <= set(content)


def vitals(run: Run) -> dict[str, object]:
    """Return a run's state; can be called at any time from any thread."""
    summary, guard, live_source = run.summary, run.context.pipeline.guard, run.context.stream.live_source
    ended = summary.ended
    return {
        "state": ended or (live_source.state if live_source else "running"),
        **({"reason": summary.exit_reason} if ended == "error" else {}),
        "frames": summary.num_frames,
        "skipped": summary.num_skipped,
        "updates": summary.num_updates,
        "last_frame": summary.last_frame,
        "lag_s": summary.lag_s,
        "guard": guard.state if guard else None,
        "guard_alarms": guard.status.total_alarms if guard else None,
        "estimate": summary.estimates or None,
        **run.record.live_counts,
    }


@dataclass(frozen=True)
class HealthOptions:
    """The health file."""

    health: Annotated[
        Path | None,
        output_option(
            "Status file (JSON), rewritten every few seconds: time, state, frames, updates.",
            metavar="FILE",
            more="reliability.md#as-a-service",
        ),
    ] = None


class Health(GroupCallback):
    """Keeps a health file of a run, or of those of many streams, from before the first frame to the end."""

    options = HealthOptions

    def __init__(self, path: str | Path, every_s: float = EVERY_S) -> None:
        self.path, self._every_s = Path(path), every_s

    @classmethod
    def from_options(cls, options: HealthOptions, run: PlannedRun) -> Self | None:
        if options.health is None:
            return None
        check_health_path(options.health, run.folder)
        return cls(options.health)

    def on_start(self, run: Run) -> None:
        self._open(run.summary.output, partial(vitals, run))

    def on_end(self, summary: RunSummary) -> None:
        self._file.close()

    def on_group_start(self, group: StreamGroup) -> None:
        self._open(group.folder, group.vitals)

    def on_group_end(self, summary: StreamGroupSummary) -> None:
        self._file.close()

    def _open(self, folder: Path, report: Callable[[], Mapping[str, object]]) -> None:
        check_health_path(self.path, folder)
        self._file = HealthFile(self.path, report, self._every_s)


class HealthFile:
    """Rewrites a JSON file every few seconds from its own thread, so that it stays fresh while the model works.

    A fresh `time` shows that the process is alive; the other values show whether the run makes progress. Raise
    OutputError if the file cannot be written at the start; later failures are ignored, and the file goes stale.

    Args:
        path: The file, whose folder is created if needed; if it is a link, its target is replaced.
        report: Returns the values to write besides the time; called from the thread.
    """

    def __init__(self, path: Path, report: Callable[[], Mapping[str, object]], every_s: float = EVERY_S) -> None:
        self._path, self._report, self._every_s = _target(path), report, every_s
        self._done = threading.Event()
        with writing(self._path.parent):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._path.parent, (glob.escape(self._path.name),))
        self._write()
        self._thread = threading.Thread(target=self._keep_fresh, name="remtta-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the final values."""
        self._done.set()
        self._thread.join()
        with contextlib.suppress(OutputError):
            self._write()

    def _keep_fresh(self) -> None:
        while not self._done.wait(self._every_s):
            with contextlib.suppress(OutputError):  # a full disk may have space again
                self._write()

    def _write(self) -> None:
        values = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **self._report()}
        text = to_json(values) + "\n"
        write_atomically(self._path, lambda temporary: temporary.write_text(text, encoding="utf-8"), durable=False)
