"""The counts of a run, and the result of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remtta.guard.observer import Answers
from remtta.streams.batches import Batch


@dataclass
class Counts:
    """Counts of a run.

    Attributes:
        frames: Frames seen, including unreadable ones.
        skipped: Frames that could not be read.
        updates: Optimizer steps taken, including those undone by a reset.
        frames_in_delta: Frames on which the current weights were adapted, including those of a starting delta.
        frames_since_reset: The same since the last reset.
        not_adapted: Frames that were predicted but excluded from learning.
        by_source: Frames predicted by the source model alone.
        by_both: Frames predicted by both models.
        smoothed: Frames whose predictions were smoothed with earlier frames.
    """

    frames: int = 0
    skipped: int = 0
    updates: int = 0
    frames_in_delta: int = 0
    frames_since_reset: int = 0
    not_adapted: int = 0
    by_source: int = 0
    by_both: int = 0
    smoothed: int = 0


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch.

    Attributes:
        batch: The batch.
        answers: Predictions of the K readable frames, from before the update; their logits are finite, on the CPU.
        update: Number of updates since the last reset at the time of the prediction.
        updates_after: The same after the batch.
        counts_before: `frames_in_delta` and `frames_since_reset` before the batch.
        adapted: Whether the batch led to an update.
        called: Whether the method was called on the batch, and has its views in `last_views`.
        excluded: Reasons why readable frames were excluded from learning, by frame index.
        answer_seconds: Time until the predictions are there; includes the update, unless that comes later.
        seconds: Duration of the batch, including the update.
    """

    batch: Batch
    answers: Answers
    update: int
    updates_after: int
    counts_before: tuple[int, int]
    adapted: bool = False
    called: bool = False
    excluded: Mapping[int, str] = field(default_factory=dict)
    answer_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def num_learned(self) -> int:
        """Number of frames used in an update."""
        return len(self.batch.readable) - len(self.excluded) if self.adapted else 0
