"""The one loop: batch after batch is predicted, learned from, and handed on."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from remtta.engines.interrupts import Interrupts
from remtta.errors import RemttaError
from remtta.guard.accuracy import Estimator
from remtta.guard.observed import ObservedMethod
from remtta.guard.observer import Answers
from remtta.models.card import ModelCard
from remtta.models.weights import Committed
from remtta.runs.batch import Batch, BatchResult, Counts
from remtta.runs.budget import OUT_OF_TIME
from remtta.runs.states import take_back

PATIENCE_S = 2.0  # a batch that takes longer is not waited for when told to stop


C = TypeVar("C", bound=Counts)


class Policy(Protocol):
    """Says which frames are not to be learned from."""

    def unfit(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Why which readable frames are not, by frame index; `pixels` (K, 3, H, W) are preprocessed."""

    def finished(self, result: BatchResult) -> None:
        """Take note of what came of the batch; until then a stop may undo it."""


class Listener(Protocol):
    """Gets what comes of each batch. No stop comes between."""

    def answered(self, result: BatchResult) -> None:
        """Write down its predictions, which are counted once this returns."""

    def finished(self, result: BatchResult) -> None:
        """Write down the rest; everything is counted."""

    def pass_on(self, result: BatchResult) -> None:
        """Hand its predictions out, after all that; where answers go out early, before anything is learned."""


@dataclass(frozen=True)
class Moment(Generic[C]):
    """All that a session needs to go on from the end of a batch.

    Attributes:
        counts: Of the kind that the session counts with.
        state: The adapter's.
    """

    counts: C
    state: Mapping[str, Tensor]


@dataclass
class _Mark(Generic[C]):
    """The end of the last finished batch, while there is more than that.

    Attributes:
        busy: Whether a batch is being worked on.
        before: The moment before it, if that was kept.
        counts: The counts, where predictions have run ahead of them.
    """

    busy: bool = False
    before: Moment[C] | None = None
    counts: C | None = None


class Session(Generic[C]):
    """Has an adapter predict and learn from batches, and tells a listener.

    A quick batch is finished before a stop. Before a slow one, what a stop would then have to save is kept.

    Args:
        adapter: The method, perhaps under the guard.
        card: The model's.
        counts: Where it counts; those of a run that it goes on with, or new ones.
        policy: Which frames are not learned from.
        listener: Who is told.
        interrupts: Turns signals into a stop at a safe moment.
        reset_every: Frames that entered an update after which the source weights come back; None for never.
        episodic: Whether they come back before every batch.
        adapt_for: Frames after which it only predicts; None for never.
        answer_early: Tell the listener of predictions before the update begins.
    """

    def __init__(
        self,
        adapter: ObservedMethod,
        card: ModelCard,
        counts: C,
        *,
        policy: Policy,
        listener: Listener,
        interrupts: Interrupts,
        reset_every: int | None = None,
        episodic: bool = False,
        adapt_for: int | None = None,
        answer_early: bool = False,
    ) -> None:
        self.adapter, self.counts, self._card = adapter, counts, card
        self._policy, self._listener, self._interrupts = policy, listener, interrupts
        self._resets, self._adapt_for = (episodic, reset_every), adapt_for
        self._answer_early = answer_early
        self._seconds = math.inf  # what the last batch took
        self._mark: _Mark[C] = _Mark()
        self.committed: Committed = adapter.method.committed  # as of the last finished batch

    def run(self, batches: Iterable[Batch]) -> None:
        """Work through batches.

        Raises:
            Stopped: If a signal came in; `moment` is what to save.
            RemttaError: If predictions are not finite numbers.
        """
        for batch in batches:
            self.adapter.in_turn(partial(self._take, batch))

    def answer(self, batch: Batch) -> None:
        """Predict frames that are learned from with the rest of their batch, if that comes, and hand this out."""
        self.adapter.in_turn(partial(self._tell_early, batch))

    def _take(self, batch: Batch) -> None:
        if batch.early:
            with self._interrupts.held():
                self._tell_early(batch)
            return
        with self._stoppable():
            self._work(batch)

    def _tell_early(self, batch: Batch) -> None:
        if self._mark.counts is None:
            self._mark.counts = replace(self.counts)
        result = self._answer(replace(batch, learn=False))
        result = replace(result, batch=batch, adapted=self.adapter.learns)  # as is meant
        self._write(result)
        self._listener.pass_on(result)

    def go_on(self, path: Path, moment: Moment[C]) -> None:
        """Go on from a moment that a file held, before the first batch.

        Raises:
            UsageError: If its state is not one that this session would save.
        """
        if moment.state:
            self.adapter.in_turn(partial(take_back, path, moment.state, self.adapter))
            self.committed = self.adapter.method.committed
        self.counts = moment.counts

    @property
    def quick(self) -> bool:
        """Whether the last batch took so little that a stop can wait for another prediction."""
        return self._seconds < PATIENCE_S

    @property
    def moment(self) -> Moment[C] | None:
        """The end of the last finished batch; None in the middle of one, where it was not kept."""
        mark = self._mark
        return mark.before if mark.busy else Moment(mark.counts or self.counts, self.adapter.state())

    def reset(self) -> None:
        """Back to the source weights, between two batches."""
        self.adapter.reset()
        self.committed = self.adapter.method.committed
        self.counts.frames_in_delta = self.counts.frames_since_reset = 0

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Put off a stop until the batch is done, if it is quick; else keep what the stop would have to save."""
        if not self.quick and self.adapter.method.norms_only:  # a state of gigabytes is not held twice
            self._mark.before = Moment(self._mark.counts or replace(self.counts), self.adapter.state())
        with self._interrupts.held() if self.quick else contextlib.nullcontext():
            self._mark.busy = True
            yield

    def _work(self, batch: Batch) -> None:
        started = time.monotonic()
        result = self._answer(batch)
        if self._answer_early:
            with self._interrupts.held():
                self._write(result)
                self._listener.pass_on(result)
            # After a stop from here on, the saved state is behind; a resumed run makes these predictions again.
            self.adapter.learn()
        result = self._after_learning(result, started)
        with self._interrupts.held():
            if not self._answer_early:
                self._write(result)
            self._finish(result)
            if not self._answer_early:
                self._listener.pass_on(result)

    def _answer(self, batch: Batch) -> BatchResult:
        """Predictions, and the update that goes with them unless it is to come later."""
        method, frames = self.adapter.method, batch.readable
        answers: Answers | None = None
        unfit: dict[int, str] = {}
        called = False
        behind = self.counts.frames_in_delta, self.counts.frames_since_reset
        if self._adapt_for is not None and self.counts.frames >= self._adapt_for:
            self.adapter.frozen = True
        if frames and self._reset_is_due(batch):
            self.adapter.reset()
            behind = 0, 0
        answer_seconds, update = 0.0, method.num_updates
        if frames:
            images = torch.stack([frame.image for frame in frames if frame.image is not None])
            pixels = self._card.preprocessing.normalise(images.to(self._card.device, non_blocking=True))
            learn = batch.learn and method.adapts and not self.adapter.frozen
            unfit = dict(self._policy.unfit(batch, pixels)) if learn else {}
            fit = torch.tensor([learn and unfit.get(frame.index) in (None, OUT_OF_TIME) for frame in frames])
            why = OUT_OF_TIME if OUT_OF_TIME in unfit.values() else self.adapter.left_out(pixels, fit)
            unfit = {frame.index: why for frame in frames if why} | unfit
            called = bool(fit.any()) and not why and not self.adapter.retired
            labels = None if batch.labels is None else batch.labels.to(self._card.device)
            started = time.monotonic()
            update = method.num_updates
            answers = self.adapter.predict(
                pixels, fit, labels, left_out=why is not None, later=self._answer_early, early=batch.early
            )
            answers.logits = answers.logits.cpu()
            _check_finite(answers.logits, batch)
            answer_seconds = time.monotonic() - started
        estimator = self.adapter.find(Estimator)
        return BatchResult(
            batch=batch,
            answers=answers,
            update=update,
            updates_after=update,
            adapted=called and self.adapter.learns,  # a guess, where the update is still to come
            unfit=unfit,
            behind=behind,
            called=called,
            answer_seconds=answer_seconds,
            seconds=answer_seconds,
            estimates=estimator.estimates if estimator else {},
        )

    def _reset_is_due(self, batch: Batch) -> bool:
        episodic, every = self._resets
        return episodic or (batch.learn and every is not None and self.counts.frames_since_reset >= every)

    def _after_learning(self, result: BatchResult, started: float) -> BatchResult:
        update, after = result.update, self.adapter.method.num_updates
        adapted = after > update or 0 < after < update  # some methods go back to the source by themselves
        self._seconds = time.monotonic() - started
        return replace(result, updates_after=after, adapted=adapted, seconds=self._seconds)

    def _write(self, result: BatchResult) -> None:
        self._listener.answered(result)
        untold = result.batch.untold
        num_readable = sum(frame.image is not None for frame in untold)
        self.counts.frames += len(untold)
        self.counts.skipped += len(untold) - num_readable
        self.counts.by_source += num_readable * result.by_source
        self.counts.by_both += num_readable * result.by_both
        self.counts.smoothed += sum(result.smoothed[result.batch.num_told_readable :])

    def _finish(self, result: BatchResult) -> None:
        counts, kept = self.counts, result.updates_after >= result.update
        counts.frames_in_delta, counts.frames_since_reset = (result.num_learned + kept * each for each in result.behind)
        counts.updates += result.new_updates
        counts.not_adapted += len(result.unfit)
        self._policy.finished(result)
        self.committed = self.adapter.method.committed
        self._mark = _Mark()
        self._listener.finished(result)


def _check_finite(logits: Tensor, batch: Batch) -> None:
    if not torch.isfinite(logits).all():
        raise RemttaError(
            f"the model's outputs are not finite numbers from frame {batch.frames[0].index} on; "
            "use a lower --lr, or check the checkpoint"
        )
