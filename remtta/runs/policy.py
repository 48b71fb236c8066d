"""The policy of `adapt`: which frames are predicted but not learned from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from remtta.runs.batch import BatchResult
from remtta.runs.budget import OUT_OF_TIME, TimeBudget
from remtta.runs.session import Policy
from remtta.streams.batches import Batch
from remtta.streams.fitness import not_to_learn_from


class FitFrames(Policy):
    """Learns from all but black and repeated frames, while there is time.

    Attributes:
        fingerprint: Fingerprint of the last readable video frame of the last finished batch.
    """

    def __init__(self, budget: TimeBudget) -> None:
        self.fingerprint: str | None = None
        self._newest: str | None = None
        self._budget = budget

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Return why readable frames are excluded, by frame index."""
        reasons, self._newest = not_to_learn_from(batch.frames, self.fingerprint)
        if self._budget.allows(batch.frames):
            return reasons
        return {frame.index: OUT_OF_TIME for frame in batch.readable} | reasons

    def finished(self, result: BatchResult) -> None:
        """Store the batch's last fingerprint and its duration."""
        self.fingerprint = self._newest
        self._budget.note(result.seconds, len(result.batch.frames), adapted=result.adapted)
