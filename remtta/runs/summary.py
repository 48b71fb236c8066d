"""A run's progress, from which it can resume, and its summary in numbers and text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remtta.deltas import DELTA
from remtta.errors import RemttaError, counted
from remtta.interrupts import Stopped
from remtta.runs.folder import PREDICTIONS
from remtta.runs.loop import Counts
from remtta.runs.pipe import ReaderGone
from remtta.runs.reading import Row, shown_estimates

if TYPE_CHECKING:
    from remtta.pipeline.pipeline import Pipeline

_ENOUGH_IN_ORDER = 0.25  # share of frames for which smoothing is worth a line


@dataclass
class RunProgress(Counts):
    """Counts of a run at a moment when its files and its method's state agree."""

    seconds: float = 0.0  # running time, over all parts of the run
    num_bytes: int = 0  # size of `predictions.jsonl`
    rows_sha256: str | None = None  # hash of that many bytes of it
    event_bytes: int = 0  # size of `events.jsonl`
    dropped: int = 0  # frames of a live source that were dropped for newer ones
    gaps: int = 0  # how often a live source was lost and came back
    fingerprint: str | None = None  # fingerprint of the last readable video frame
    last: list[str | int | None] | None = None  # source and number of the last frame seen

    def count(self, rows: Iterable[Row]) -> None:
        """Count rows that were written after the last save."""
        for row in rows:
            if "gap" in row:
                self.gaps += 1
                continue
            self.frames += 1
            self.skipped += "error" in row
            self.not_adapted += "not_adapted" in row
            self.by_source += row.get("answered_by") == "source"
            self.by_both += row.get("answered_by") == "both"
            self.smoothed += "raw" in row
            self.last, self.fingerprint = [row["source"], row.get("frame")], None


class GuardStop(Exception):
    """Raised to end the run when the guard has used up its retries."""


@dataclass
class RunSummary:
    """A run's summary."""

    output: Path  # the run's folder
    progress: RunProgress = field(default_factory=RunProgress)  # the counts, over all parts of a resumed run
    untimed: int = 0  # predicted frames that took an unknown time, after the last save of an earlier part
    num_alarms: int = 0  # alarms of the guard
    doubted_lead: float | None = None  # the adapted model's lead while the guard is in doubt
    num_resumed: int = 0  # how often the run was resumed
    exit_reason: str = "running"  # or "completed", a signal's name, "closed pipe", "guard", or "error: ..."
    signum: int | None = None  # the signal that stopped it, if any
    last_frame: str | None = None  # time at which a frame was last predicted: UTC, ISO 8601
    lag_s: float | None = None  # age of the oldest frame of a live source's last batch when it was predicted
    entropy: float | None = None  # mean entropy of the last batch's predictions, in nats
    estimates: Mapping[str, float] = field(default_factory=dict)  # of the last frames' accuracy, by model
    smooths: bool = False  # whether predictions are smoothed over ordered frames
    in_order: int = 0  # frames that would have been otherwise, since the run began or resumed

    def count_unsaved(self, rows: Iterable[Row]) -> None:
        """Count rows that an earlier part wrote after its last save."""
        before = self.num_predicted
        self.progress.count(rows)
        self.untimed += self.num_predicted - before

    def note_guard(self, pipeline: Pipeline) -> None:
        """Note the guard's alarms, and its doubt."""
        self.num_alarms, self.doubted_lead = pipeline.total_alarms, None
        guard = pipeline.guard
        if guard and guard.watches and guard.state == "doubt" and math.isfinite(guard.status.lead):
            self.doubted_lead = round(guard.status.lead, 4)

    def end(self, reason: BaseException) -> None:
        """Record why the run ended: a stop, a closed pipe, the guard, or an error."""
        if isinstance(reason, Stopped):
            self.exit_reason, self.signum = str(reason), reason.signum
        elif isinstance(reason, ReaderGone):
            self.exit_reason = "closed pipe"
        elif isinstance(reason, GuardStop):
            self.exit_reason = "guard"
        else:
            self.exit_reason = f"error: {reason}" if isinstance(reason, RemttaError) else f"error: {reason!r}"

    @property
    def ended(self) -> str | None:
        """The end of the run in a word or two; None while it is running."""
        return None if self.exit_reason == "running" else self.exit_reason.partition(":")[0]

    @property
    def num_frames(self) -> int:
        """Number of frames seen, including unreadable ones."""
        return self.progress.frames

    @property
    def num_skipped(self) -> int:
        """Number of frames that could not be read."""
        return self.progress.skipped

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps taken."""
        return self.progress.updates

    @property
    def seconds(self) -> float:
        """Duration from the first frame requested to the last file written."""
        return self.progress.seconds

    @property
    def num_predicted(self) -> int:
        """Number of frames with a prediction."""
        return self.num_frames - self.num_skipped

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, including decoding and writing."""
        return (self.num_predicted - self.untimed) / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "frames": self.num_frames,
            "predicted": self.num_predicted,
            "skipped": self.num_skipped,
            "dropped": self.progress.dropped,
            "updates": self.num_updates,
            "not_adapted": self.progress.not_adapted,
            "guard_alarms": self.num_alarms,
            "doubted_lead": self.doubted_lead,
            "answered_by_source": self.progress.by_source,
            "answered_by_both": self.progress.by_both,
            "smoothed": self.progress.smoothed,
            "in_order": self.in_order,
            "images_per_s": round(self.images_per_s, 2),
            "estimate": dict(self.estimates) or None,
        }

    def report(self) -> str:
        """Return a few lines of text for the user."""
        progress = self.progress
        how = "" if self.exit_reason == "completed" else f", ended early: {self.ended}"
        dropped = f"{progress.dropped} dropped for newer ones, " if progress.dropped else ""
        by_source = f"{counted(progress.by_source, 'frame')} predicted by the source"
        unrelated = "none, as no relation between successive frames was found"
        smoothed = counted(progress.smoothed, "frame") if progress.smoothed else unrelated
        in_order = f"{self.in_order} of {counted(self.num_predicted, 'frame')}"
        lead = 100 * (self.doubted_lead or 0.0)
        lines = {
            f"{counted(self.num_frames, 'frame')}, {self.num_predicted} predicted, {self.num_skipped} skipped, "
            f"{dropped}{counted(self.num_updates, 'update')}, {self.images_per_s:.1f} images/s{how}": True,
            f"predicted without an update: {counted(progress.not_adapted, 'frame')}": progress.not_adapted,
            f"guard: {counted(self.num_alarms, 'alarm')}, {by_source}": self.num_alarms or progress.by_source,
            f"guard: in doubt at the end, with a lead of {lead:+.0f} %: label a sample before you use the delta, or "
            "try --method fast (docs/guard.md)": self.doubted_lead is not None,
            f"predicted by both models: {counted(progress.by_both, 'frame')}": progress.by_both,
            f"smoothed over time: {smoothed}": self.smooths,
            f"classes persist from frame to frame, in {in_order}: --smooth auto combines their predictions "
            "(docs/estimates.md)": self.in_order >= _ENOUGH_IN_ORDER * self.num_predicted > 0,
            f"estimated accuracy of the last frames: {shown_estimates(self.estimates)}": self.estimates,
            **{str(path): path.exists() for path in (self.output / PREDICTIONS, self.output / DELTA)},
            f"continue with --output {self.output} --resume": self.signum,
        }
        return "\n".join(line for line, shown in lines.items() if shown)
