"""Save a run's state and delta, and load the state: a position in the stream and the tensors of the method."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from remtta.deltas import DELTA
from remtta.deltas.delta import save_delta
from remtta.errors import DeltaError, RemttaError, UsageError
from remtta.models.tensor_files import UNREADABLE, read_tensors, save_tensors
from remtta.runs.folder import STATE
from remtta.runs.loop import AdaptationLoop, other_version
from remtta.runs.record import RunContext, RunRecord, delta_of
from remtta.runs.summary import RunSummary

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_POSITION = "position"
_SLOW_S = 0.5
_SHARE = 20  # a slow save may take 1 / 20 of the total time

P = TypeVar("P", bound="DataclassInstance")

_log = logging.getLogger("remtta")


def save_state(path: Path, position: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Save a position, in the terms of JSON, and a method's state, atomically; raise OutputError if that fails."""
    save_tensors(path, tensors, {_POSITION: json.dumps(position, allow_nan=False)})


def load_position(path: Path, kind: type[P]) -> tuple[P, dict[str, Tensor]]:
    """Load a position of a dataclass, and the state; both are empty if nothing was saved yet. Raise UsageError if the
    file is damaged or of another version; RemttaError if it cannot be read.
    """
    if not path.exists():
        return kind(), {}
    try:
        header, state = read_tensors(path)
        position = json.loads(header[_POSITION])
        if not isinstance(position, dict):
            raise ValueError("it holds no position")
    except OSError as error:
        raise RemttaError(f"{path} cannot be read: {error.strerror or error}") from error
    except (*UNREADABLE, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({error}); start again with --overwrite") from error
    if set(position) != {field.name for field in fields(kind)}:
        raise other_version(path)
    return kind(**position), state


class SaveRhythm:
    """Limits the time spent on saves to a small share of the total."""

    def __init__(self) -> None:
        self._saved_at, self._took = time.monotonic(), 0.0

    @property
    def is_costly(self) -> bool:
        """True if a save is slow, and was made so recently that another may be skipped."""
        return self._took > _SLOW_S and not self.allows()

    def allows(self, every_s: float = 0.0) -> bool:
        """Return whether it is time to save again, at least `every_s` seconds after the last save."""
        return time.monotonic() - self._saved_at > max(every_s, _SHARE * self._took)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time the save inside the block."""
        started = time.monotonic()
        yield
        self._saved_at = time.monotonic()
        self._took = self._saved_at - started


class Saver:
    """Saves a run's state, delta and record, periodically and at the end."""

    def __init__(self, context: RunContext, summary: RunSummary, record: RunRecord, loop: AdaptationLoop) -> None:
        self._context, self._summary, self._record, self._loop = context, summary, record, loop
        self._rhythm, self._num_saves = SaveRhythm(), 0  # num_saves: updates // save_every at the last check
        self._saved_frames = 0

    def after_batch(self) -> None:
        """Save what is due after a batch."""
        options, before = self._context.options, self._num_saves
        self._num_saves = self._loop.counts.updates // options.save_every
        due = self._num_saves != before and not self._rhythm.is_costly
        if due or self._rhythm.allows(options.save_every_s):
            self._save()

    def while_waiting(self) -> None:
        """Save what is due by time between two batches, which may be far apart: the source may be lost."""
        if self._loop.counts.frames != self._saved_frames and self._rhythm.allows(self._context.options.save_every_s):
            self._save()

    def _save(self) -> None:
        with self._rhythm.timed():
            self.finish()
        self._record.write()

    def finish(self) -> None:
        """Save state and delta as of the last finished batch; if one fails, the other is still tried.

        An error before the first prediction leaves neither.
        """
        self._saved_frames = self._loop.counts.frames
        if not (self._summary.num_predicted or self._summary.signum):
            return
        try:
            self._save_delta()
        finally:
            if snapshot := self._loop.snapshot:  # else in the middle of a batch; keep the previous save
                progress, state = snapshot
                save_state(self._summary.output / STATE, asdict(progress), state)

    def _save_delta(self) -> None:
        committed, context = self._loop.committed, self._context
        if not committed.delta or not (context.pipeline.method.norms_only or context.options.save_full):
            return
        delta = delta_of(context.info, context.method, context.config, context.options.batch_size, committed)
        try:
            save_delta(self._summary.output / DELTA, delta)
        except DeltaError as error:  # the outputs will not be finite either, and stop the run
            _log.warning("%s; the delta saved before stays", error)
        else:
            _log.debug("saved the delta after %d updates", committed.num_updates)
