"""The loop: predict each batch, update on it, and hand on the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import call
from pathlib import Path

import torch
from torch import Tensor

from remtta.errors import DeltaError, NotFiniteError, UsageError
from remtta.interrupts import Interrupts
from remtta.models.info import ModelInfo
from remtta.pipeline.pipeline import Adaptation, Pipeline
from remtta.pipeline.prediction import Prediction, Update
from remtta.streams.batches import Batch

OUT_OF_TIME = "out of time"
"""Why a frame enters no update: no time was left. It still counts for the guard and the centering."""

_NEW_IN_STATE = {"temperature.log"}  # names that states of 0.5.0 lack

PATIENCE_S = 2.0  # do not wait for slower batches when asked to stop


@dataclass
class Counts:
    """Counts of a run."""

    frames: int = 0  # frames seen, including unreadable ones
    skipped: int = 0  # frames that could not be read
    updates: int = 0  # optimizer steps, without those that the guard undid at once
    frames_in_delta: int = 0  # frames on which the current weights were adapted, including those of a starting delta
    frames_since_reset: int = 0  # frames learned from since the last reset, without those of a starting delta
    not_adapted: int = 0  # frames that were predicted but excluded from updates
    by_source: int = 0  # frames predicted by the source model alone
    by_both: int = 0  # frames predicted by both models
    smoothed: int = 0  # frames whose predictions were smoothed with earlier frames


@dataclass(frozen=True)
class BatchResult:
    """The result of a batch."""

    batch: Batch
    # Predictions of the K readable frames, from before the update; their logits are finite, on the CPU.
    prediction: Prediction
    adapted: bool = False  # whether the batch led to an update; assumed until then
    # Reasons why readable frames were excluded from updates, by frame index.
    excluded: Mapping[int, str] = field(default_factory=dict)
    prediction_seconds: float = 0.0  # until the predictions are there; includes the update without `latency`
    seconds: float = 0.0  # duration of the batch, including the update

    @property
    def num_learned(self) -> int:
        """Number of frames used in an update."""
        return len(self.batch.readable) - len(self.excluded) if self.adapted else 0

    @property
    def unreported(self) -> BatchResult:
        """The result without the frames whose predictions were reported early."""
        count = self.batch.num_reported
        reported = sum(frame.image is not None for frame in self.batch.frames[:count])
        batch = replace(self.batch, frames=self.batch.frames[count:], num_reported=0)
        return replace(self, batch=batch, prediction=self.prediction.without_first(reported))


RunExclusively = Callable[[Callable[[], None]], None]
"""Calls a function that uses the model, while nothing else uses it."""

Snapshot = tuple[Counts, Mapping[str, Tensor]]
"""Everything needed to resume a loop from the end of a batch: its counts, and the pipeline's state."""


class LearningPolicy:
    """Decides which frames are excluded from updates; by default none."""

    def excluded(self, batch: Batch, pixels: Tensor) -> Mapping[int, str]:
        """Return why readable frames are excluded, by frame index; `pixels` (K, 3, H, W) are preprocessed."""
        return {}

    def finished(self, result: BatchResult) -> None:
        """Store what later decisions need; until this is called, a stop may undo the batch."""


class LoopCallback:
    """Receives the result of each batch; every hook has a default. With `latency`, a signal can end the run between
    `on_prediction` and `on_batch_end`; otherwise both run, or neither.
    """

    def on_prediction(self, result: BatchResult) -> None:
        """Write the predictions, except those that were reported early; they are counted once this returns."""

    def on_batch_end(self, result: BatchResult) -> None:
        """Write the rest; everything is counted."""

    def deliver(self, result: BatchResult) -> None:
        """Send what `on_prediction` wrote to readers, at the end; with `latency`, before the update."""


class AdaptationLoop:
    """Predicts batches and updates on them with a pipeline, and notifies a callback.

    On a stop, a batch that takes under 2 s is completed; of a slower one, the state from before is saved. Frames of a
    `live` stream do not come again after a failure, so its state is copied before every batch, not only before slow
    ones. `run_exclusively` uses a model that others use, too.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        info: ModelInfo,
        counts: Counts,
        *,
        policy: LearningPolicy,
        callback: LoopCallback,
        interrupts: Interrupts,
        reset_every: int | None = None,
        adapt_for: int | None = None,
        latency: bool = False,
        live: bool = False,
        run_exclusively: RunExclusively = call,
    ) -> None:
        self.pipeline, self.counts, self._info = pipeline, counts, info
        self._policy, self._callback, self._interrupts = policy, callback, interrupts
        self._reset_every, self._adapt_for, self._latency = reset_every, adapt_for, latency
        self._live, self._run_exclusively = live, run_exclusively
        self.last_batch_was_fast = False  # whether the last batch was fast enough for a stop to wait for another
        self._in_batch = False  # whether a batch is in progress
        self._before: Snapshot | None = None  # the end of the last finished batch, if it was copied
        self._counts_before: Counts | None = None  # the counts there, if early predictions have advanced the loop's
        self._early_seconds = 0.0  # spent on early predictions of the next batch's frames
        self.committed = pipeline.committed  # as of the last finished batch

    def run(self, batches: Iterable[Batch]) -> None:
        """Process batches; raise Stopped on a signal (save `snapshot` then), NotFiniteError for outputs like NaN."""
        for batch in batches:
            self._run_exclusively(partial(self._predict_early if batch.early else self._process, batch))

    def _process(self, batch: Batch) -> None:
        """Predict a batch, and update on it."""
        with self._interrupts.held() if self.last_batch_was_fast else contextlib.nullcontext():
            if (
                self._live or not self.last_batch_was_fast
            ) and self.pipeline.method.norms_only:  # do not hold gigabytes twice
                self._before = self._counts_before or replace(self.counts), self.pipeline.state_dict()
            started, self._in_batch = time.monotonic(), True
            result = self._predict(batch)
            if self._latency:
                with self._interrupts.held():
                    self._write_and_count(result)
                    self._callback.deliver(result.unreported)
                # If stopped after this, the saved state lags behind; a resumed run repeats these predictions.
            learning = time.monotonic()
            update = self.pipeline.learn(None if batch.labels is None else batch.labels.to(self._info.device))
            result = self._timed(result, update, started, learning)
            with self._interrupts.held():
                if not self._latency:
                    self._write_and_count(result)
                self._finish(result, update)
                if not self._latency:
                    self._callback.deliver(result.unreported)

    def _predict_early(self, batch: Batch) -> None:
        """Predict and report frames; their rows say whether they will enter an update with the rest of their batch."""
        with self._interrupts.held():
            self._counts_before = self._counts_before or replace(self.counts)
            result = replace(self._predict(replace(batch, learn=False)), batch=batch, adapted=self.pipeline.learns)
            self._early_seconds += result.seconds
            self._write_and_count(result)
            self._callback.deliver(result.unreported)

    def _predict(self, batch: Batch) -> BatchResult:
        """Return the predictions of a batch."""
        frames = batch.readable
        self._freeze_or_reset(batch)
        if not frames:
            none = torch.empty(0, self._info.num_classes), torch.empty(0, dtype=torch.bool)
            return BatchResult(batch, Prediction(*none, num_updates=self.pipeline.method.num_updates))
        images = torch.stack([frame.image for frame in frames if frame.image is not None])
        pixels = self._info.preprocessing.normalise(images.to(self._info.device, non_blocking=True))
        learn = batch.learn and self.pipeline.adapts
        excluded = self._policy.excluded(batch, pixels) if learn else {}
        learnable = torch.tensor([learn and excluded.get(frame.index) in (None, OUT_OF_TIME) for frame in frames])
        in_time = OUT_OF_TIME not in excluded.values()
        started = time.monotonic()
        prediction = self.pipeline.predict(pixels, learnable, update=in_time, latency=self._latency, early=batch.early)
        prediction = replace(prediction, logits=prediction.logits.cpu())
        if not torch.isfinite(prediction.logits).all():
            # Neither state nor weights are worth saving, so `snapshot` must give none.
            self._before, self._in_batch, self.committed = None, True, Adaptation({}, 0, 0)
            raise NotFiniteError(
                f"the model's outputs are not finite numbers from frame {batch.frames[0].index} on; "
                "use a lower --lr, or check the checkpoint"
            )
        seconds = time.monotonic() - started
        if reason := prediction.skipped if in_time else OUT_OF_TIME:
            excluded = {**{frame.index: reason for frame in frames}, **excluded}
        adapted = bool(prediction.learned.any()) and not prediction.harmful
        return BatchResult(batch, prediction, adapted, excluded, prediction_seconds=seconds, seconds=seconds)

    def _timed(self, result: BatchResult, update: Update, started: float, learning: float) -> BatchResult:
        """Return a batch's result, with its update and its durations."""
        now = time.monotonic()
        self.last_batch_was_fast = now - started < PATIENCE_S
        predicted = result.prediction_seconds + (0.0 if self._latency else now - learning)
        seconds, self._early_seconds = now - started + self._early_seconds, 0.0
        adapted = update.num_steps > 0 and self.pipeline.method.num_updates > 0  # some methods reset themselves
        return replace(result, adapted=adapted, prediction_seconds=predicted, seconds=seconds)

    def _freeze_or_reset(self, batch: Batch) -> None:
        """Stop updates, or restore the source weights, if it is time to."""
        counts = self._counts_before or self.counts  # without frames of this batch that were predicted early
        if self._adapt_for is not None and counts.frames >= self._adapt_for:
            self.pipeline.frozen = True
        due = self._reset_every is not None and self.counts.frames_since_reset >= self._reset_every
        if due and batch.readable and batch.learn and not self.pipeline.frozen:
            self.pipeline.reset()
            self.counts.frames_since_reset = 0

    def _write_and_count(self, result: BatchResult) -> None:
        result = result.unreported
        self._callback.on_prediction(result)
        counts, batch, prediction = self.counts, result.batch, result.prediction
        num_readable = len(batch.readable)
        counts.frames += len(batch.frames)
        counts.skipped += len(batch.frames) - num_readable
        counts.by_source += num_readable * (prediction.weight == 0)
        counts.by_both += num_readable * (0 < prediction.weight < 1)
        counts.smoothed += sum(prediction.smoothed)

    def _finish(self, result: BatchResult, update: Update) -> None:
        """Count a batch."""
        counts = self.counts
        if update.reset or self.pipeline.method.config.episodic:
            counts.frames_since_reset = 0
        counts.frames_since_reset += result.num_learned
        counts.frames_in_delta = self.pipeline.frames_in_delta
        counts.updates += update.num_steps
        counts.not_adapted += len(result.excluded)
        self._policy.finished(result)
        self.committed = self.pipeline.committed
        self._in_batch, self._before, self._counts_before = False, None, None
        self._callback.on_batch_end(result)

    # Between two batches.

    @property
    def snapshot(self) -> Snapshot | None:
        """A snapshot of the last finished batch; None in the middle of a batch if it was not copied."""
        return self._before if self._in_batch else (self._counts_before or self.counts, self.pipeline.state_dict())

    def resume_from(self, path: Path, state: Mapping[str, Tensor]) -> None:
        """Resume from the state in a file, before the first batch; raise UsageError if it is not this loop's."""
        if state:
            try:
                self._run_exclusively(partial(load_whole, state, self.pipeline))
                self.pipeline.frames_in_delta = self.counts.frames_in_delta
            except ValueError as error:
                raise other_version(path) from error
            self.committed = self.pipeline.committed

    def start_new_stream(self) -> None:
        """Restore the source weights for an independent stream."""
        self.pipeline.start_new_stream()
        self.counts.frames_in_delta = self.counts.frames_since_reset = 0
        self.committed = self.pipeline.committed


def load_whole(state: Mapping[str, Tensor], pipeline: Pipeline) -> None:
    """Load a state into a pipeline; raise ValueError if it is not exactly what the pipeline would save."""
    try:
        pipeline.load_state_dict(state)
        names = pipeline.state_dict().keys()
    except torch.OutOfMemoryError:
        raise
    except (DeltaError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the state does not fit: {error}") from error
    if differing := (names ^ state.keys()) - (_NEW_IN_STATE - state.keys()):
        raise ValueError(f"the state has {', '.join(sorted(differing)[:3])}, or lacks it")


def other_version(path: Path) -> UsageError:
    """Return the error for a state that is undamaged, but not of this version."""
    return UsageError(
        f"the state in {path.parent} was written by another version of remtta; start again with --overwrite"
    )
