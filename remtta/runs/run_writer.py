"""Write the results of a run of `adapt`: a row per frame, a line per event, and the counts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from remtta.errors import counted
from remtta.methods.losses import entropy
from remtta.methods.source import CenteredSource, Source
from remtta.pipeline.events import log_event
from remtta.pipeline.smoothing import FilterState
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.folder import BATCHES, EVENTS, PREDICTIONS
from remtta.runs.hints import hint_at_stride
from remtta.runs.loop import BatchResult, LoopCallback
from remtta.runs.reading import Row
from remtta.runs.record import RunContext, RunRecord
from remtta.runs.rows import RowFormat, batch_row, prediction_rows
from remtta.runs.summary import RunSummary
from remtta.runs.writer import RowWriter

_log = logging.getLogger("remtta")


class RunWriter(LoopCallback):
    """Writes a run's rows and events, synced to disk before anything else happens, counts, and reports each batch to
    the callbacks.
    """

    def __init__(
        self, context: RunContext, summary: RunSummary, record: RunRecord, callbacks: Sequence[Callback]
    ) -> None:
        self._context, self._record, self._callbacks = context, record, callbacks
        self._form = RowFormat(context.info.labels, topk=context.options.topk, logits=context.options.logits)
        self._rows: RowWriter | None = None
        self._events: RowWriter | None = None
        self._batches: RowWriter | None = None
        self._written: list[Row] = []
        self._order = None if summary.smooths else FilterState.initial(context.info.num_classes)
        self._added = b""  # lines that the latest batch added to the file
        self.summary = summary
        self.started = time.monotonic()  # when the run began, minus the duration of its earlier parts

    @property
    def begun(self) -> bool:
        """True if its files are open."""
        return self._rows is not None

    def begin(self, *, resume: bool = False) -> None:
        """Create its files, or open those of an earlier run whose state was saved at the summary's progress, and go on
        from there; raise UsageError if lines are missing or damaged.
        """
        live, progress, guard = self._context.stream.live, self.summary.progress, self._context.pipeline.guard
        self._rows = RowWriter(
            self.summary.output / PREDICTIONS,
            keep_bytes=progress.num_bytes,
            keep_tail=resume,
            durable=True,
            kept_sha256=progress.rows_sha256,
            remade=not live,
        )
        if self._rows.num_damaged:
            damaged = counted(self._rows.num_damaged, "damaged line")
            _log.warning("writing %s at the end of %s again", damaged, PREDICTIONS)
        if live:
            self.summary.count_unsaved(self._rows.unsaved_rows())  # their frames cannot be read again
        watches = self._context.pipeline.centering.active or (guard is not None and guard.watches)
        if live or self._context.options.expire_below is not None or watches:
            path = self.summary.output / EVENTS
            kept = progress.event_bytes if path.exists() else 0  # if the user deleted the events, go on without them
            self._events = RowWriter(path, keep_bytes=kept, keep_tail=resume and live, durable=True)  # or made again
            if live:
                self._events.unsaved_rows()
        path = self.summary.output / BATCHES
        self._batches = RowWriter(path, keep_bytes=_bytes_before(progress.frames, path) if resume else 0)
        if resume:
            self.started -= progress.seconds
        self._note_progress()

    def expected_rows(self) -> list[Row]:
        """Return the rows of the earlier run that were not produced again yet."""
        return self._rows.expected_rows() if self._rows else []

    def on_prediction(self, result: BatchResult) -> None:
        assert self._rows is not None and self._batches is not None
        batch = result.batch
        agreed, self._written = self._rows.num_changed == 0, prediction_rows(result, self._form)
        if batch.frames:  # first: if the disk is full, there are neither these rows nor their count
            self._batches.write([self._batch_row(result)])
        self._added = self._rows.write(self._written)
        if agreed and self._rows.num_changed:
            _log.warning(
                "from frame %d on, some predictions differ from those made before the run was stopped, which stay; "
                "another machine, device or number of threads?",
                next(row["index"] for row in self._written if "index" in row),
            )
        for frame in batch.frames:
            if frame.gap:
                self.summary.progress.gaps += 1
                self.write_event(frame.index, {"event": "gap", "source": frame.source, **dataclasses.asdict(frame.gap)})
            if frame.error and self._context.options.on_error == "skip":
                _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)
        self._record.latencies.add(result.prediction_seconds, len(batch.readable))
        if self._order is not None:
            for order in self._order.after(result.prediction.logits):
                self._order = order
                self.summary.in_order += order.ordered
        if batch.frames:
            first, last, summary, logits = batch.frames[0], batch.frames[-1], self.summary, result.prediction.logits
            summary.progress.last = [last.source, last.number]
            summary.last_frame = datetime.now(UTC).isoformat(timespec="seconds")
            live = self._context.stream.live_source
            summary.lag_s = round(live.age(first.time_s or 0.0), 3) if live and first.read_at else None
            summary.entropy = float(entropy(logits).mean()) if len(logits) else None

    def on_batch_end(self, result: BatchResult) -> None:
        """Write events, and note durations."""
        summary, progress, frames = self.summary, self.summary.progress, result.batch.frames
        self._record.steps.add(result.seconds, len(result.batch.readable))
        if live := self._context.stream.live_source:
            progress.dropped = live.backlog.dropped
        self._note_progress()  # at once: if an event cannot be written, the state must not count rows that it lacks
        summary.note_guard(self._context.pipeline)
        summary.estimates = result.prediction.estimates or summary.estimates
        for frame in frames:
            self._record.reads.add(frame.read_s, 1)
            self._record.decodes.add(frame.decode_s, 1)
        for event in self._context.pipeline.events():
            self.write_event(frames[0].index, event)
            log_event(event, f"frame {frames[0].index}: ")
        method = self._context.pipeline.method
        if frames[0].index == 0 and method.adapts and method.config.adapt_every == 1:
            hint_at_stride(self._context.stream.name, result.batch.readable)
        self._note_progress()

    def deliver(self, result: BatchResult) -> None:
        """Report a batch to the callbacks."""
        guard = self._context.pipeline.guard
        rows = [row for row in self._written if "gap" not in row]
        report = BatchReport(result.batch.frames, rows, self._added, guard.state if guard else None, self.summary)
        for callback in self._callbacks:
            callback.on_batch(report)

    def write_event(self, index: int, event: Mapping[str, object]) -> None:
        """Write an event at a frame, with the time."""
        if self._events:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._events.write([{"time": now, "frame": index, **event}])

    def close(self) -> None:
        """Close the files."""
        for writer in (self._rows, self._events, self._batches):
            if writer:
                writer.close()

    def _batch_row(self, result: BatchResult) -> Row:
        pipeline, prediction = self._context.pipeline, result.prediction
        method, raw = pipeline.method, prediction.raw_adapted if pipeline.guard is None else prediction.raw_source
        offset = next((offset for offset in pipeline.centering.offsets.values() if offset.ndim), None)
        source = None if prediction.shifted else prediction.raw_source
        keeps = method.config.bn == "running" or not method.model.batch_norms.norms
        if self._context.start is None and keeps and type(method) in (Source, CenteredSource):
            source = prediction.raw_adapted  # the source model's, too
        return batch_row(result, self._written, self._form, offset=offset, raw=raw, source=source)

    def _note_progress(self) -> None:
        """Store the sizes of the files, without lines still expected from the earlier run, and the running time."""
        assert self._rows is not None
        progress = self.summary.progress
        progress.num_bytes, progress.rows_sha256 = self._rows.size, self._rows.sha256
        progress.event_bytes = self._events.size if self._events else 0
        progress.seconds = time.monotonic() - self.started


def _bytes_before(num_frames: int, path: Path) -> int:
    """Return the size of the rows on batches of the first frames; a killed run may lack the last of them."""
    size = 0
    with contextlib.suppress(FileNotFoundError, ValueError, LookupError, TypeError), open(path, "rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["frame"] >= num_frames:
                break
            size += len(line)
    return size
