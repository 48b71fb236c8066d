"""One pass over a stream, and the files it leaves."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from remtta.errors import OutputError, RemttaError, StreamError, UsageError
from remtta.runs.batch import Batch, BatchResult
from remtta.runs.budget import Budget
from remtta.runs.folder import PREDICTIONS, RECORD, STATE, RunFolder
from remtta.runs.interrupts import Interrupts, Stopped
from remtta.runs.journal import Journal
from remtta.runs.place import Place, check_same_run, load_place, read_record, unseen_frames
from remtta.runs.policy import FitFrames
from remtta.runs.record import Plan, Record
from remtta.runs.saving import Saver
from remtta.runs.session import Moment, Session
from remtta.runs.summary import RunSummary
from remtta.runs.writer import ReaderGone
from remtta.streams.batches import Batches
from remtta.streams.prefetch import DecodedFrame

_log = logging.getLogger("remtta")


class GuardStop(Exception):
    """The guard's retries are used up, and it is to end the run."""


class Run:
    """One pass over a stream, from the claim of its folder to the last save; `adapt_stream` sets it up.

    Args:
        plan: What is to be run.
        folder: Where the results go.
        pipe: A binary stream that gets the prediction lines as well.
        on_batch: Called after every batch with what the run has come to.
        interrupts: Turns signals into a clean stop.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        pipe: BinaryIO | None = None,
        on_batch: Callable[[RunSummary], None] | None = None,
        interrupts: Interrupts,
    ) -> None:
        options, live = plan.options, plan.stream.live
        self._plan, self._interrupts = plan, interrupts
        self._on_batch = on_batch or (lambda summary: None)
        self._folder = RunFolder(folder, overwrite=options.overwrite, resume=options.resume)
        place = Place(frames_in_delta=plan.start.frames if plan.start else 0)
        self.summary = RunSummary(folder, place)
        eventful = live or plan.adapter.guard is not None
        self._journal = Journal(folder, pipe, plan.card.labels, options, eventful=eventful, live=live)
        self.record = Record(plan, folder)
        self._policy = FitFrames(Budget(options.max_ms, options.realtime))
        self._session = Session(
            plan.adapter,
            plan.card,
            place,
            policy=self._policy,
            listener=self,
            interrupts=interrupts,
            reset_every=options.reset_every,
            episodic=plan.config.episodic,
            answer_early=options.latency,
        )
        self._saver = Saver(folder, plan, self._session, self.record)
        self._started = time.monotonic()

    def execute(self) -> RunSummary:
        """Go through the stream.

        Raises:
            RemttaError: Whatever ends the run early but a signal, a closed pipe or the guard.
        """
        summary, stream = self.summary, self._plan.stream
        begun = refused = False
        self._started = time.monotonic()
        try:
            with self._interrupts.held():
                self._go_on()
            self._stop_if_ended()
            batches = Batches(stream, self._plan.options, self._plan.card.preprocessing)
            unseen = unseen_frames(stream, summary.place)
            decoded = batches.decoded(unseen, first=summary.place.frames, wait=self._interrupts.check)
            with contextlib.closing(stream), contextlib.closing(decoded) as frames:
                first = next(frames, None)
                if first is None and not summary.num_resumed:
                    self._refuse_none()
                    summary.exit_reason = "completed"
                    return summary
                with self._interrupts.held():  # a folder claimed by half could not be finished
                    self._begin(first)
                    begun = True
                self._session.run(self._batches(batches.of(itertools.chain([first] if first else [], frames))))
            if summary.num_predicted == 0:
                raise StreamError(
                    f"{stream.name}: none of {summary.num_frames} frame(s) could be read (see {PREDICTIONS})"
                )
            summary.exit_reason = "completed"
        except Stopped as stop:
            summary.exit_reason, summary.signum = stop.name, stop.signum
        except ReaderGone:
            summary.exit_reason = "closed pipe"
        except GuardStop:
            summary.exit_reason = "guard"
        except BaseException as error:
            self._failed(error)
            refused = isinstance(error, UsageError) and not begun  # what an earlier run left stays as it is
            if isinstance(error, StreamError) and stream.live:
                with self._interrupts.held(), contextlib.suppress(OutputError):  # the first error is the one to tell
                    self._journal.write_event(summary.num_frames, {"event": "lost", "reason": str(error)})
            raise
        finally:
            with self._interrupts.finishing():
                self._close(refused=refused)
        return summary

    def _refuse_none(self) -> None:
        """Refuse a source without a frame, unless it is a list, which may be empty."""
        if self._plan.stream.kind != "paths" or self._plan.options.require_frames:
            raise StreamError(f"{self._plan.stream.name}: the stream held no frames")
        _log.info("the list of frames is empty: nothing was done, and no run folder is left")

    def answered(self, result: BatchResult) -> None:
        """Write a batch's predictions."""
        batch, place = result.batch, self.summary.place
        self.record.latencies.add(result.answer_seconds, len(batch.readable))
        self._journal.write(result)
        last = batch.frames[-1]
        place.last = last.source, last.number
        self.summary.note_answer(batch.frames[0].read_at)
        if self._plan.options.on_error == "skip":
            for frame in batch.frames:
                if frame.error:
                    _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)

    def finished(self, result: BatchResult) -> None:
        """Write down what else happened, and save what is due."""
        place, frames = self.summary.place, result.batch.frames
        place.fingerprint = self._policy.fingerprint
        self.summary.num_alarms = self._plan.adapter.total_alarms
        for frame in frames:
            if frame.gap:
                place.gaps += 1
                self._journal.write_gap(frame.index, frame.source, frame.gap)
        for event in self._plan.adapter.events():
            self._journal.write_decision(frames[0].index, event)
        self._note_place()
        self._saver.after(result, self.summary)

    def pass_on(self, result: BatchResult) -> None:
        """Send a batch's predictions down the pipe, if there is one."""
        self._journal.echo(self._interrupts)
        self.summary.place.passed_bytes = self.summary.place.num_bytes

    def _note_place(self) -> None:
        place = self.summary.place
        self._journal.note(place)
        place.seconds = time.monotonic() - self._started

    def _go_on(self) -> None:
        """Go on with the run in the folder, if that is asked for and there is one."""
        folder = self._folder.path
        if not (self._plan.options.resume and (folder / RECORD).exists()):
            return
        self._folder.lock()
        earlier = read_record(folder / RECORD)
        check_same_run(earlier, self.record.content(self.summary))
        place, state = load_place(folder / STATE)
        self._session.go_on(folder / STATE, Moment(place, state))
        place.count(self._journal.go_on(place))  # they cannot be seen again
        self.summary.place, self._policy.fingerprint = place, place.fingerprint
        self.summary.num_alarms = self._plan.adapter.total_alarms
        self.summary.num_resumed = earlier.get("resumed", 0) + 1
        self.record.go_on(earlier, place)
        self._started -= place.seconds
        self._note_place()
        self._folder.keep_room(self._plan.last_bytes)
        if self._plan.options.replay:
            self._journal.replay(place, self._interrupts)
        _log.info("going on with %s after %d frames and %d updates", folder, place.frames, place.updates)

    def _claim(self) -> None:
        """Make the folder this run's, once."""
        if not self._journal.begun:
            self._folder.claim()
            self._journal.begin()
            self._folder.keep_room(self._plan.last_bytes)

    def _begin(self, first: DecodedFrame | None) -> None:
        self._claim()
        self.record.write(self.summary)
        if first and first.read_at and self.summary.num_resumed:
            self._journal.write_event(first.index, {"event": "resumed"})

    def _batches(self, frames: Iterable[list[DecodedFrame]]) -> Iterator[Batch]:
        """The stream's batches; what comes behind each `yield` is done once the batch is finished."""
        for batch in frames:
            yield Batch(batch)
            self._stop_if_ended()
            broken = next((frame for frame in batch if frame.error), None)
            if broken and self._plan.options.on_error == "stop":
                raise StreamError(f"{broken.source}: {broken.error} (frame {broken.index}; --on-error skip goes on)")
            self._on_batch(self.summary)

    def _write_last_record(self) -> None:
        """The record, with rows that an earlier part promised and this one did not come to."""
        self.summary.place = replace(self.summary.place)  # the session's own says what was done
        self.summary.place.count(self._journal.expected_rows())
        self.record.write(self.summary)

    def _stop_if_ended(self) -> None:
        if self._plan.adapter.ended:
            raise GuardStop

    def _failed(self, error: BaseException) -> None:
        self.summary.exit_reason = f"error: {error}" if isinstance(error, RemttaError) else f"error: {error!r}"

    def _close(self, *, refused: bool) -> None:
        """Save everything but for a run that never was, and let go of the folder."""
        self.summary.place.seconds = time.monotonic() - self._started
        with contextlib.ExitStack() as last:
            last.callback(self._folder.release)
            last.callback(self._journal.close)
            if refused or not (self._journal.begun or self.summary.signum is not None):
                return
            self._claim()
            self._folder.give_room()
            last.callback(self._write_last_record)
            try:
                self._saver.finish()
            except OutputError as error:
                self._failed(error)
                raise
