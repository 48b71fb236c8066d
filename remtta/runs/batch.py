"""What goes into the loop, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from remtta.guard.observer import Answers
from remtta.streams.prefetch import DecodedFrame


@dataclass
class Counts:
    """What a run has come to.

    Attributes:
        frames: Frames seen, unreadable ones included.
        skipped: Frames that could not be read.
        updates: Optimizer steps taken, also those that a reset undid.
        frames_in_delta: Frames that the weights were adapted on, an earlier delta's included.
        frames_since_reset: Those since the last reset.
        not_adapted: Frames that were predicted but not fit to be adapted on.
        by_source: Frames that the source model answered.
        by_both: Frames that it had a share in.
        smoothed: Frames whose answers went by the frames before, too.
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
class Batch:
    """Frames that are predicted, and perhaps learned from, together.

    Attributes:
        frames: In stream order; K of them can be read.
        labels: Class positions (K,) of the readable ones, where they are known.
        learn: Whether the method may learn from them.
        early: Whether they are only predicted now, and come again with the rest of their batch.
        num_told: Frames at the beginning whose predictions were handed out early.
    """

    frames: Sequence[DecodedFrame]
    labels: Tensor | None = None
    learn: bool = True
    early: bool = False
    num_told: int = 0

    @property
    def readable(self) -> list[DecodedFrame]:
        """The frames with an image."""
        return [frame for frame in self.frames if frame.image is not None]

    @property
    def untold(self) -> Sequence[DecodedFrame]:
        """The frames whose predictions are still to be handed out."""
        return self.frames[self.num_told :]

    @property
    def num_told_readable(self) -> int:
        """How many of the told ones have an image."""
        return sum(frame.image is not None for frame in self.frames[: self.num_told])


@dataclass(frozen=True)
class BatchResult:
    """What came of a batch.

    Attributes:
        batch: The batch.
        answers: To the K readable frames, from before the update; None where no frame could be read.
        update: Updates that the weights had seen when they predicted, since the last reset.
        updates_after: The same after the batch.
        adapted: Whether the fit ones of its frames entered an update.
        unfit: Why which of its readable frames did not, by frame index.
        behind: Frames that the weights before it were adapted on, and those since the last reset.
        called: Whether the method saw its fit frames, which has left their views in `last_views`.
        answer_seconds: What the prediction took.
        seconds: What the batch took, the update included.
        estimates: Estimated accuracies of the last frames, this batch included.
    """

    batch: Batch
    answers: Answers | None
    update: int
    updates_after: int
    adapted: bool
    unfit: Mapping[int, str]
    behind: tuple[int, int]
    called: bool
    answer_seconds: float
    seconds: float
    estimates: Mapping[str, float] = field(default_factory=dict)

    @property
    def logits(self) -> Tensor | None:
        """The answers' logits, shape (K, C), finite, on the CPU."""
        return None if self.answers is None else self.answers.logits

    @property
    def by_source(self) -> bool:
        """Whether the source model answered alone."""
        return self.answers is not None and self.answers.weight == 0

    @property
    def by_both(self) -> bool:
        """Whether both models answered."""
        return self.answers is not None and 0 < self.answers.weight < 1

    @property
    def smoothed(self) -> list[bool]:
        """Which answers went by the frames before, too."""
        return [] if self.answers is None else self.answers.smoothed

    @property
    def update_told(self) -> int:
        """`update` as rows tell it: the source model has seen none."""
        return 0 if self.by_source else self.update

    @property
    def num_learned(self) -> int:
        """Frames that entered an update."""
        return len(self.batch.readable) - len(self.unfit) if self.adapted else 0

    @property
    def new_updates(self) -> int:
        """Optimizer steps of this batch."""
        undone = self.updates_after < self.update  # some methods go back to the source by themselves, after a step
        return 1 if undone else self.updates_after - self.update
