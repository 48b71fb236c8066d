"""The loop: predict each batch, learn from it, and hand on the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from remtta.engines.interrupts import Interrupts
from remtta.errors import RemttaError
from remtta.guard.observed import ObservedMethod
from remtta.guard.observer import Answers
from remtta.models.card import ModelCard
from remtta.models.weights import Committed
from remtta.runs.states import load_whole, other_version
from remtta.streams.batches import Batch

OUT_OF_TIME = "out of time"
"""Why a frame is not learned from: no time was left. It still counts for the guard and the centring."""

PATIENCE_S = 2.0  # do not wait for slower batches when asked to stop


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


Snapshot = tuple[Counts, Mapping[str, Tensor]]
"""Everything needed to resume a session from the end of a batch: its counts, and the adapter's state."""


class LearningPolicy:
    """Decides which frames are excluded from learning; by default none."""

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Return why readable frames are excluded, by frame index; `pixels` (K, 3, H, W) are preprocessed."""
        return {}

    def finished(self, result: BatchResult) -> None:
        """Store what later decisions need; until this is called, a stop may undo the batch."""


class Listener:
    """Receives the result of each batch. A stop may come before `finished` only if predictions come before the update.
    Every hook has a default.
    """

    def answered(self, result: BatchResult) -> None:
        """Write the predictions, which are counted once this returns."""

    def finished(self, result: BatchResult) -> None:
        """Write the rest; everything is counted."""

    def deliver(self, result: BatchResult) -> None:
        """Send the predictions to readers, at the end; with early answers, before anything is learned."""


class AdaptationLoop:
    """Predicts and learns from batches with an adapter, and notifies a listener.

    A fast batch is finished before a stop. Before a slow one, the state to be saved on a stop is kept.

    Args:
        counts: New counts, or those of a run to resume.
        reset_every: Restore the source weights after this many learned frames; None for never.
        adapt_for: Only predict after this many frames; None for never.
        answer_early: Pass predictions to the listener before the update begins.
        keeps: Keep that state before fast batches, too: after a failure, frames of a live source do not come again.
    """

    def __init__(
        self,
        adapter: ObservedMethod,
        card: ModelCard,
        counts: Counts,
        *,
        policy: LearningPolicy,
        listener: Listener,
        interrupts: Interrupts,
        reset_every: int | None = None,
        adapt_for: int | None = None,
        answer_early: bool = False,
        keeps: bool = False,
    ) -> None:
        self.adapter, self.counts, self._card = adapter, counts, card
        self._policy, self._listener, self._interrupts = policy, listener, interrupts
        self._reset_every, self._adapt_for, self._answer_early = reset_every, adapt_for, answer_early
        self.quick = False  # whether the last batch was fast enough for a stop to wait for another
        self._keeps = keeps
        self._busy = False  # whether a batch is in progress
        self._before: Snapshot | None = None  # the end of the last finished batch, if it was kept
        self._counts_before: Counts | None = None  # the counts there, if early predictions have advanced the session's
        self._early_seconds = 0.0  # spent on early predictions of the next batch's frames
        self.committed: Committed = adapter.method.committed  # as of the last finished batch

    def run(self, batches: Iterable[Batch]) -> None:
        """Process batches; raise Stopped on a signal (save `snapshot` then), RemttaError if outputs are not finite."""
        for batch in batches:
            self.adapter.in_turn(partial(self._predict_early if batch.early else self._process, batch))

    def _predict_early(self, batch: Batch) -> None:
        """Predict and report frames; their rows say whether they will be learned from with the rest of their batch."""
        with self._interrupts.held():
            self._counts_before = self._counts_before or replace(self.counts)
            result = replace(self._answer(replace(batch, learn=False)), batch=batch, adapted=self.adapter.learns)
            self._early_seconds += result.seconds
            self._write(result)
            self._listener.deliver(result)

    def resume_from(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Resume from the state in a file, before the first batch; raise UsageError if it is not this session's."""
        if state:
            try:
                self.adapter.in_turn(partial(load_whole, state, self.adapter))
            except ValueError as error:
                raise other_version(path) from error
            self.committed = self.adapter.method.committed

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot of the last finished batch; None in the middle of a batch if it was not kept."""
        return self._before if self._busy else (self._counts_before or self.counts, self.adapter.state())

    def restart(self) -> None:
        """Restore the source weights for an independent stream, between two batches."""
        self.adapter.restart()
        self.committed = self.adapter.method.committed
        self.counts.frames_in_delta = self.counts.frames_since_reset = 0

    def _process(self, batch: Batch) -> None:
        """Predict and learn from a batch. A stop waits for a fast one; before a slow one, the state is kept for it."""
        with contextlib.ExitStack() as stack:
            if self.quick:
                stack.enter_context(self._interrupts.held())
            if (self._keeps or not self.quick) and self.adapter.method.norms_only:  # do not hold gigabytes twice
                self._before = self._counts_before or replace(self.counts), self.adapter.state()
            started, self._busy = time.monotonic(), True
            result = self._answer(batch)
            if self._answer_early:
                with self._interrupts.held():
                    self._write(result)
                    self._listener.deliver(result)
                # If stopped after this, the saved state lags behind; a resumed run repeats these predictions.
                self.adapter.learn()
            seconds = time.monotonic() - started
            self.quick = seconds < PATIENCE_S
            seconds, self._early_seconds = seconds + self._early_seconds, 0.0
            update, after = result.update, self.adapter.method.num_updates
            adapted = after > update or 0 < after < update  # some methods reset themselves
            result = replace(result, adapted=adapted, seconds=seconds)
            with self._interrupts.held():
                if not self._answer_early:
                    self._write(result)
                self._finish(result, after - update)
                if not self._answer_early:
                    self._listener.deliver(result)

    def _answer(self, batch: Batch) -> BatchResult:
        """Return the predictions of a batch, and update unless that comes later."""
        counts_before = self._prepare(batch)
        method, frames = self.adapter.method, batch.readable
        update = method.num_updates
        if not frames:
            return BatchResult(batch, Answers(method), update, counts_before)
        images = torch.stack([frame.image for frame in frames if frame.image is not None])
        pixels = self._card.preprocessing.normalise(images.to(self._card.device, non_blocking=True))
        fit, excluded, left_out = self._exclusions(batch, pixels)
        learns = bool(fit.any()) and not left_out and not self.adapter.retired
        labels = None if batch.labels is None else batch.labels.to(self._card.device)
        started = time.monotonic()
        answers = self.adapter.predict(
            pixels, fit, labels, left_out=left_out, later=self._answer_early, early=batch.early
        )
        answers.logits = answers.logits.cpu()
        if not torch.isfinite(answers.logits).all():
            # Neither state nor weights are worth keeping; busy, so that `snapshot` gives none.
            self._before, self._busy, self.committed = None, True, ({}, 0)
            raise RemttaError(
                f"the model's outputs are not finite numbers from frame {batch.frames[0].index} on; "
                "use a lower --lr, or check the checkpoint"
            )
        seconds = time.monotonic() - started
        return BatchResult(
            batch,
            answers,
            update,
            counts_before,
            adapted=learns,  # assumed, if the update comes later
            called=learns,
            excluded=excluded,
            answer_seconds=seconds,
            seconds=seconds,
        )

    def _prepare(self, batch: Batch) -> tuple[int, int]:
        """Freeze or reset the weights if it is time to; return `frames_in_delta` and `frames_since_reset`."""
        before = self._counts_before or self.counts  # without frames of this batch that were predicted early
        if self._adapt_for is not None and before.frames >= self._adapt_for:
            self.adapter.frozen = True
        episodic = self.adapter.method.objective.config.episodic
        due = self._reset_every is not None and self.counts.frames_since_reset >= self._reset_every
        if batch.readable and (episodic or (due and batch.learn and not self.adapter.frozen)):
            self.adapter.reset()
            return 0, 0
        return self.counts.frames_in_delta, self.counts.frames_since_reset

    def _exclusions(self, batch: Batch, pixels: Tensor) -> tuple[Tensor, Mapping[int, str], bool]:
        """Return which readable frames are fit (K,), the reasons of those excluded, and whether the whole batch is."""
        frames = batch.readable
        learn = batch.learn and self.adapter.method.adapts and not self.adapter.frozen
        excluded = self._policy.excluded(batch, pixels) if learn else {}
        fit = torch.tensor([learn and excluded.get(frame.index) in (None, OUT_OF_TIME) for frame in frames])
        why = OUT_OF_TIME if OUT_OF_TIME in excluded.values() else self.adapter.left_out(fit)
        return fit, {**{frame.index: why for frame in frames if why}, **excluded}, why is not None

    def _write(self, result: BatchResult) -> None:
        self._listener.answered(result)
        unreported = result.batch.unreported
        num_readable = sum(frame.image is not None for frame in unreported)
        self.counts.frames += len(unreported)
        self.counts.skipped += len(unreported) - num_readable
        self.counts.by_source += num_readable * (result.answers.weight == 0)
        self.counts.by_both += num_readable * (0 < result.answers.weight < 1)
        self.counts.smoothed += sum(result.answers.smoothed[result.batch.num_reported_readable :])

    def _finish(self, result: BatchResult, made: int) -> None:
        """Count a batch after which there are `made` more updates since the last reset, fewer if there was one."""
        counts = self.counts
        counts.frames_in_delta, counts.frames_since_reset = (
            result.num_learned + (made >= 0) * each for each in result.counts_before
        )
        undone = made < 0 or (made == 0 and result.answers.undone)  # by the guard, or by the method's own reset
        counts.updates += int(result.called) if undone else made
        counts.not_adapted += len(result.excluded)
        self._policy.finished(result)
        self.committed = self.adapter.method.committed
        self._busy, self._before, self._counts_before = False, None, None
        self._listener.finished(result)
