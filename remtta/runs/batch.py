"""The counts of a run, and the result of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remtta.guard.observer import Answers
from remtta.streams.batches import Batch


@dataclass
class Counts:
    """Counts of a run."""

    frames: int = 0  # frames seen, including unreadable ones
    skipped: int = 0  # frames that could not be read
    updates: int = 0  # optimizer steps taken, including those undone by a reset
    frames_in_delta: int = 0  # frames on which the current weights were adapted, including those of a starting delta
    frames_since_reset: int = 0  # the same since the last reset
    not_adapted: int = 0  # frames that were predicted but excluded from learning
    by_source: int = 0  # frames predicted by the source model alone
    by_both: int = 0  # frames predicted by both models
    smoothed: int = 0  # frames whose predictions were smoothed with earlier frames


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch."""

    batch: Batch
    # Predictions of the K readable frames, from before the update; their logits are finite, on the CPU.
    answers: Answers
    update: int  # number of updates since the last reset at the time of the prediction
    updates_after: int  # the same after the batch
    counts_before: tuple[int, int]  # `frames_in_delta` and `frames_since_reset` before the batch
    adapted: bool = False  # whether the batch led to an update
    called: bool = False  # whether the method was called on the batch, and has its views in `last_views`
    # Reasons why readable frames were excluded from learning, by frame index.
    excluded: Mapping[int, str] = field(default_factory=dict)
    answer_seconds: float = 0.0  # time until the predictions are there; includes the update, unless that comes later
    seconds: float = 0.0  # duration of the batch, including the update

    @property
    def num_learned(self) -> int:
        """Number of frames used in an update."""
        return len(self.batch.readable) - len(self.excluded) if self.adapted else 0
