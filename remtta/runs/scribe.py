"""Record the results of each batch of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from remtta.engines.interrupts import Interrupts
from remtta.methods.losses import entropy
from remtta.runs.batch import BatchResult
from remtta.runs.journal import Journal
from remtta.runs.policy import FitFrames
from remtta.runs.reading import Row
from remtta.runs.record import Plan, Record
from remtta.runs.summary import RunSummary
from remtta.runs.viewing import View, Viewer
from remtta.streams.fitness import near_equal

_VARIED_PER_S = 3  # frames of a video that --frame-stride is to leave, roughly

_log = logging.getLogger("remtta")


class Scribe:
    """Listens to a run's session: writes rows and events, updates counts, triggers saves.

    Args:
        plan: The run's plan.
        summary: The run's summary.
        journal: Writes rows and events.
        record: Stores the latencies.
        policy: Stores the fingerprint of the last frame.
        save: Saves what is due after a batch.
        interrupts: Ends the wait for a blocked reader.
        viewers: Called with every batch's frames and rows.

    Attributes:
        started: When the run began, minus the duration of its earlier parts; in seconds of the monotonic clock.
    """

    def __init__(
        self,
        plan: Plan,
        summary: RunSummary,
        journal: Journal,
        record: Record,
        policy: FitFrames,
        save: Callable[[BatchResult], None],
        interrupts: Interrupts,
        viewers: Sequence[Viewer] = (),
    ) -> None:
        self._plan, self._summary, self._journal, self._record = plan, summary, journal, record
        self._policy, self._save, self._interrupts = policy, save, interrupts
        self._viewers, self._rows = viewers, list[Row]()
        self.started = time.monotonic()

    def answered(self, result: BatchResult) -> None:
        """Write a batch's predictions."""
        batch, place = result.batch, self._summary.place
        self._record.latencies.add(result.answer_seconds, len(batch.readable) - batch.num_reported_readable)
        self._rows = self._journal.write(result)
        last = batch.frames[-1]
        place.last = last.source, last.number
        nats = None if result.logits is None else float(entropy(result.logits).mean())
        self._summary.note_answer(batch.frames[0].read_at, nats)
        if self._plan.options.on_error == "skip":
            for frame in batch.unreported:
                if frame.error:
                    _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)

    def finished(self, result: BatchResult) -> None:
        """Write events and durations, and save what is due."""
        place, frames = self._summary.place, result.batch.frames
        self._record.steps.add(result.seconds, len(result.batch.readable))
        place.fingerprint = self._policy.fingerprint
        self._summary.num_alarms = self._plan.adapter.total_alarms
        self._summary.estimates = result.estimates
        self._summary.num_dropped = self._record.num_dropped
        for frame in frames:
            self._record.reads.add(frame.read_s, 1)
            self._record.decodes.add(frame.decode_s, 1)
            if frame.gap:
                place.gaps += 1
                self._journal.write_gap(frame.index, frame.source, frame.gap)
        for event in self._plan.adapter.events():
            self._journal.write_decision(frames[0].index, event)
        self._hint_at_stride(result)
        self.note_place()
        self._save(result)

    def _hint_at_stride(self, result: BatchResult) -> None:
        """Name --frame-stride once, where the first batch of a video is of near-equal frames."""
        learns = self._plan.adapter.method.adapts and self._plan.config.adapt_every == 1
        if learns and result.batch.frames[0].index == 0 and (rate := near_equal(result.batch.readable)):
            _log.info(
                "the frames of %s are nearly the same from one to the next (%.0f per second); --frame-stride %d gives "
                "more varied batches, in less time",
                self._plan.stream.name,
                rate,
                max(2, round(rate / _VARIED_PER_S)),
            )

    def deliver(self, result: BatchResult) -> None:
        """Send a batch's predictions down the pipe, if any, and to the viewers."""
        self._journal.echo(self._interrupts)
        self._summary.place.passed_bytes = self._summary.place.num_bytes
        guard = self._plan.adapter.guard
        rows = [row for row in self._rows if "gap" not in row]
        for show in self._viewers:
            show(View(result.batch.unreported, rows, self._summary, guard.judge.verdict if guard else None))

    def note_place(self) -> None:
        """Store the sizes of the files and the running time in the place."""
        place = self._summary.place
        self._journal.note(place)
        place.seconds = time.monotonic() - self.started
