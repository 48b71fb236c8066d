"""Rows, events and progress of an evaluation on disk, from which it can resume."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from remtta.errors import UsageError
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.variants import MethodVariant
from remtta.runs.folder import EVENTS, PREDICTIONS
from remtta.runs.loop import Counts, Snapshot
from remtta.runs.reading import Row, read_rows
from remtta.runs.saving import SaveRhythm, save_state
from remtta.runs.writer import RowWriter

PROGRESS = ".progress.safetensors"
DELTAS, PLOTS = "deltas", "plots"


def delta_path(folder: Path, method: str, seed: int | str) -> Path:
    """Return the path of a trial's delta."""
    return folder / DELTAS / f"{method}_seed{seed}.safetensors"


@dataclass
class TrialProgress(Counts):
    """Progress of a trial: everything before it is in `predictions.jsonl` and in the method's state."""

    visit: int = 0  # index of the current visit
    start: int = 0  # number of its images already processed
    skip: int = 0  # batches that the time-constrained scenario still only predicts
    cost_ratio: float | None = None  # the ratio used by that scenario
    adapted: int = 0  # images used in an update
    seconds: float = 0.0  # time spent in the method
    peak_bytes: int = 0  # peak memory so far


@dataclass
class TrialRecord:
    """Settings and counts of a finished trial, as in `results.json`."""

    method: str
    seed: int
    config: dict[str, Any]
    images: int  # predicted
    skipped: int  # images that could not be read
    adapted_images: int
    updates: int
    cost_ratio: float | None  # in the time-constrained scenario
    forwards_per_image: float
    backwards_per_image: float
    models_held: int
    guard: dict[str, Any] | None
    trainable_parameters: int
    adapted: list[str]  # names of the adapted tensors
    timing: dict[str, float]  # seconds and peak_memory_bytes

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TrialRecord:
        """Return the record in an object that may have more fields; raise KeyError if one is missing."""
        return cls(**{field.name: content[field.name] for field in fields(cls)})


@dataclass
class EvaluationProgress:
    """Progress of an evaluation; saved with the method's state in one file, which is replaced atomically."""

    finished: list[TrialRecord] = field(default_factory=list)  # in the order in which they ran
    current: tuple[str, int] | None = None  # method and seed of the trial that has begun
    position: TrialProgress = field(default_factory=TrialProgress)  # its progress
    num_bytes: int = 0  # size of `predictions.jsonl` at this point
    rows_sha256: str | None = None  # hash of that many bytes of it
    event_bytes: int = 0  # size of `events.jsonl`
    at_trial_start: tuple[int, str | None, int] = (0, None, 0)  # the last three when the current trial began

    def __post_init__(self) -> None:
        if isinstance(self.position, dict):  # as read from JSON
            self.position = TrialProgress(**self.position)
            self.current = self.current and (self.current[0], self.current[1])
            self.finished = [TrialRecord.from_json(cast(dict[str, Any], record)) for record in self.finished]

    def remaining(self, variants: Iterable[MethodVariant], options: EvalOptions) -> list[tuple[str, int]]:
        """Return method and seed of the trials that are not finished, in the order in which they run; the source model
        runs once, unless a seed changes more than the order of its images.
        """
        runs_once = {variant.name: variant.is_plain_source and not options.samples for variant in variants}
        finished = {(trial.method, trial.seed) for trial in self.finished}
        done = {name for name, _ in finished}
        return [
            (name, seed)
            for name, once in runs_once.items()
            if not (once and name in done)
            for seed in (options.seeds[:1] if once else options.seeds)
            if (name, seed) not in finished
        ]

    def drop_current(self) -> None:
        """Drop the rows and events of the current trial."""
        self.num_bytes, self.rows_sha256, self.event_bytes = self.at_trial_start
        self.position, self.current = TrialProgress(), None

    @classmethod
    def of_completed(cls, folder: Path, results: Mapping[str, Any]) -> EvaluationProgress:
        """Return the progress of a completed evaluation, to which methods and seeds can be added; raise UsageError if
        its rows are incomplete, or there are others.
        """
        seeds = [seed for content in results["methods"].values() for seed in content["seeds"].values()]
        finished = [TrialRecord.from_json(seed) for seed in seeds]
        rows, events = folder / PREDICTIONS, folder / EVENTS
        counts = Counter((row["method"], row["seed"]) for row in read_rows(rows)) if rows.exists() else Counter()
        if counts != {(trial.method, trial.seed): trial.images + trial.skipped for trial in finished}:
            raise UsageError(f"{rows} no longer holds the evaluation's rows; start again with --overwrite")
        event_bytes = events.stat().st_size if events.exists() else 0
        size = rows.stat().st_size
        return cls(finished, num_bytes=size, event_bytes=event_bytes, at_trial_start=(size, None, event_bytes))


class TrialWriter(contextlib.ExitStack):
    """Writes rows, events and resumable progress; a context manager."""

    def __init__(self, folder: Path, progress: EvaluationProgress, *, save_every_s: float, has_events: bool) -> None:
        super().__init__()
        self.folder, self.progress = folder, progress
        self._save_every_s, self._rhythm = save_every_s, SaveRhythm()
        rows = RowWriter(folder / PREDICTIONS, keep_bytes=progress.num_bytes, kept_sha256=progress.rows_sha256)
        self._rows = self.enter_context(contextlib.closing(rows))
        self._events: RowWriter | None = None
        if has_events:
            path = folder / EVENTS
            kept = progress.event_bytes if path.exists() else 0  # if the user deleted the events, go on without them
            self._events = self.enter_context(contextlib.closing(RowWriter(path, keep_bytes=kept)))

    def write(self, rows: Iterable[Row], events: Iterable[Row]) -> None:
        """Write the rows and events of a batch."""
        self._rows.write(rows)
        if self._events:
            self._events.write(events)

    @property
    def save_is_due(self) -> bool:
        """True if it is time to save again."""
        return self._rhythm.allows(self._save_every_s)

    def save(self, snapshot: Snapshot | None) -> None:
        """Save the progress, so that the evaluation can resume from this moment; do nothing if it is None."""
        if snapshot is None:
            return
        position, state = snapshot
        self.progress.num_bytes, self.progress.rows_sha256 = self._rows.sync(), self._rows.sha256
        self.progress.event_bytes = self._events.sync() if self._events else 0
        if position == TrialProgress():
            self.progress.at_trial_start = self.progress.num_bytes, self.progress.rows_sha256, self.progress.event_bytes
        with self._rhythm.timed():
            save_state(self.folder / PROGRESS, {**asdict(self.progress), "position": asdict(position)}, state)

    def finish(self, trial: TrialRecord) -> None:
        """Record a finished trial, and save that the next one has not begun."""
        self.progress.finished.append(trial)
        self.progress.position, self.progress.current = TrialProgress(), None
        self.save((self.progress.position, {}))
