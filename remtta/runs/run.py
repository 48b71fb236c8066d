"""One pass over a stream, and its files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from PIL.Image import Image
from torch import Tensor

from remtta.errors import FrameError, OutputError, StreamError, UsageError, counted
from remtta.interrupts import Interrupts, Stopped
from remtta.pipeline.accuracy import WINDOW
from remtta.pipeline.smoothing import Smoother
from remtta.runs.budget import LearnableFrames, TimeBudget, fingerprint
from remtta.runs.callbacks import Callback, following
from remtta.runs.folder import PREDICTIONS, RECORD, STATE, RunFolder
from remtta.runs.hints import RateCheck
from remtta.runs.loop import AdaptationLoop
from remtta.runs.pipe import ReaderGone
from remtta.runs.reading import Row, read_rows
from remtta.runs.record import RunContext, RunRecord, check_same_run
from remtta.runs.run_writer import RunWriter
from remtta.runs.saving import Saver, load_position
from remtta.runs.summary import GuardStop, RunProgress, RunSummary
from remtta.streams.batches import Batch, Batches
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream

_log = logging.getLogger("remtta")


class Run:
    """One pass over a stream, from claiming its folder to the last save; set up by `adapt_stream`."""

    def __init__(
        self, context: RunContext, folder: Path, interrupts: Interrupts, callbacks: Sequence[Callback] = ()
    ) -> None:
        options = context.options
        self.context, self.interrupts, self._callbacks = context, interrupts, callbacks
        self._folder = RunFolder(folder, overwrite=options.overwrite, resume=options.resume)
        progress = RunProgress(frames_in_delta=context.start.frames if context.start else 0)
        self.summary = RunSummary(folder, progress, smooths=context.pipeline.find(Smoother) is not None)
        self.record = RunRecord(context, self.summary)
        self._writer = RunWriter(context, self.summary, self.record, callbacks)
        rate = None
        if context.stream.live:
            skips_updates, stride = options.realtime or options.max_ms is not None, context.stream.options.frame_stride
            passes = context.pipeline.passes_per_image
            rate = RateCheck(context.method, passes, stride, skips_updates=skips_updates)
        self._loop = AdaptationLoop(
            context.pipeline,
            context.info,
            progress,
            policy=LearnableFrames(progress, TimeBudget(options.max_ms, options.realtime), rate),
            callback=self._writer,
            interrupts=interrupts,
            reset_every=options.reset_every,
            adapt_for=options.adapt_for,
            latency=options.latency,
            live=context.stream.live,
            run_exclusively=context.run_exclusively,
        )
        self._stream_batches = Batches(
            context.stream.live_source, options, context.info.preprocessing, workers=context.decoding_threads
        )
        self._saver = Saver(context, self.summary, self.record, self._loop)

    def execute(self) -> RunSummary:
        """Run over the stream; raise RemttaError if anything but a signal, a closed pipe or the guard ends it early."""
        with following(self, self._callbacks):
            self._run()
        return self.summary

    def _run(self) -> None:
        summary, stream = self.summary, self.context.stream
        begun = refused = False
        self._writer.started = time.monotonic()
        try:
            with self.interrupts.held():
                self._resume()
            self._stop_if_ended()
            row = next(read_rows(self._folder.path / PREDICTIONS), None) if summary.progress.frames else None
            unsaved, transform = self._writer.expected_rows(), self.context.info.preprocessing.transform()
            unseen = unseen_frames(stream, summary.progress, row, unsaved, transform)
            decoded = self._stream_batches.decoded(unseen, first=summary.progress.frames, wait=self._wait)
            with contextlib.closing(decoded) as frames, contextlib.closing(stream):
                first = next(frames, None)
                if first is None and not summary.num_resumed:
                    stream.check_not_empty()
                    _log.info("the list of frames is empty: nothing to do, and no run folder is left")
                    summary.exit_reason = "completed"
                    return
                with self.interrupts.held():  # a half-claimed folder could not be finished
                    self._claim()
                    self.record.write()
                    if first and first.read_at and summary.num_resumed:
                        self._writer.write_event(first.index, {"event": "resumed"})
                    begun = True
                self._loop.run(self._batches(itertools.chain([first] if first else [], frames)))
            if summary.num_predicted == 0:
                raise StreamError(f"{stream.name}: no readable frame ({summary.num_frames} failed; see {PREDICTIONS})")
            summary.exit_reason = "completed"
            if self.context.options.expire_below is not None and summary.num_predicted < WINDOW:
                text = "--expire-below needs %d frames; with %d, accuracy was not checked"
                _log.warning(text, WINDOW, summary.num_predicted)
        except (Stopped, ReaderGone, GuardStop) as end:
            summary.end(end)
            self._predict_waiting()
        except BaseException as error:
            summary.end(error)
            refused = isinstance(error, UsageError) and not begun  # keep the files of an earlier run
            if isinstance(error, StreamError) and stream.live:
                with self.interrupts.held(), contextlib.suppress(OutputError):  # report the first error
                    self._writer.write_event(summary.num_frames, {"event": "lost", "reason": str(error)})
            raise
        finally:
            with self.interrupts.deferred():
                self._close(refused=refused)

    def _resume(self) -> None:
        """Resume the run in the folder, if requested and there is one."""
        folder, earlier = self._folder.path, self.context.earlier
        if earlier is None:
            return
        self._folder.lock()
        check_same_run(earlier, self.record.content(), self.context.pipeline.method)
        earlier_progress, state = load_position(folder / STATE, RunProgress)
        progress = self.summary.progress
        vars(progress).update(vars(earlier_progress))  # in place: the loop and the policy hold it, too
        self._loop.resume_from(folder / STATE, state)
        self.summary.note_guard(self.context.pipeline)
        self.summary.num_resumed = earlier.get("resumed", 0) + 1
        self.record.resume_from(earlier)
        self._writer.begin(resume=True)
        frames, updates = counted(progress.frames, "frame"), counted(progress.updates, "update")
        _log.info("resuming %s after %s and %s", folder, frames, updates)

    def _claim(self) -> None:
        if not self._writer.begun:
            self._folder.claim()
            self._writer.begin()

    def _wait(self) -> None:
        """Save what is due while no frame is ready; raise Stopped on a signal."""
        self.interrupts.check()
        if self._writer.begun:
            with self.interrupts.held():
                self._saver.while_waiting()

    def _batches(self, frames: Iterable[DecodedFrame]) -> Iterator[Batch]:
        """Yield the stream's batches; code after each `yield` runs once the batch is finished."""
        for batch in self._stream_batches.batched(frames):
            yield batch
            if batch.early:
                continue
            with self.interrupts.held():
                self._saver.after_batch()
            self._stop_if_ended()
            broken = next((frame for frame in batch.frames if frame.error), None)
            if broken and self.context.options.on_error == "stop":
                raise StreamError(f"{broken.source}: {broken.error} (frame {broken.index}; --on-error skip continues)")

    def _write_last_record(self) -> None:
        """Write the record, counting rows that an earlier part wrote and this part did not reach."""
        self.summary.progress = replace(self.summary.progress)  # the loop's own counts stay unchanged
        self.summary.count_unsaved(self._writer.expected_rows())
        if live := self.context.stream.live_source:
            self.summary.progress.dropped = live.backlog.dropped
        self.record.write()

    def _predict_waiting(self) -> None:
        """Predict frames still waiting for a full batch, if the model is fast enough for a stop to wait."""
        early = self._stream_batches.early_batch()
        if early.frames and self.summary.signum is not None and self._writer.begun and self._loop.last_batch_was_fast:
            with self.interrupts.deferred(), contextlib.suppress(ReaderGone, Stopped):
                self._loop.run([early])

    def _stop_if_ended(self) -> None:
        guard = self.context.pipeline.guard
        if guard is not None and guard.status.disabled and guard.options.action == "stop":
            raise GuardStop

    def _close(self, *, refused: bool) -> None:
        self.summary.progress.seconds = time.monotonic() - self._writer.started
        with contextlib.ExitStack() as last:
            last.callback(self._folder.release)
            last.callback(self._writer.close)
            records = self.summary.signum is not None and not (self._folder.path / RECORD).exists()  # no earlier run
            if refused or not (self._writer.begun or records):
                return
            self._claim()
            last.callback(self._write_last_record)
            try:
                self._saver.finish()
            except OutputError as error:
                self.summary.end(error)
                raise


def unseen_frames(
    stream: Stream,
    progress: RunProgress,
    first: Row | None,
    unsaved: Sequence[Row],
    transform: Callable[[Image], Tensor],
) -> Iterator[Frame]:
    """Yield the frames of a stream that were not seen yet; all frames of a live source, which starts anew. Raise
    UsageError if the stream no longer starts with the frames seen before, in that order.

    Args:
        first: The run's first row, if it has one: a pipe of other frames is refused at once, not at the last one seen.
        unsaved: The rows that the run wrote after its last save; the stream must still have their frames.
        transform: From an image to the model's input, a uint8 tensor (3, H, W).
    """
    limit = stream.options.limit if stream.live else None  # other sources stop at it by themselves
    frames, left = stream.frames, None if limit is None else max(0, limit - progress.frames)
    # Only once the first frame is read is it known whether the address is a finite video.
    if stream.live and left != 0 and (head := next(frames, None)):
        frames = itertools.chain([head], frames)
    if stream.live and not (progress.frames and stream.live_source and stream.live_source.finite):
        yield from itertools.islice(frames, left)
        return
    wanted = "the paths in the same order (sort -V)" if stream.kind == "paths" else "the same source and --frame-stride"
    advice = f"give {wanted}, or choose another --output"
    rows = {0: first, **dict(enumerate(unsaved, progress.frames))}
    known = {number: [row["source"], row.get("frame")] for number, row in rows.items() if row}
    if progress.frames and progress.last:
        known[progress.frames - 1] = progress.last
    num_known, seen = progress.frames + len(unsaved), 0
    for number, frame in enumerate(frames):
        if (was := known.get(number)) and [frame.source, frame.number] != was:
            now, before = (
                source if part is None else f"frame {part} of {source}"
                for source, part in ((frame.source, frame.number), was)
            )
            raise UsageError(f"frame {number} of {stream.name} is {now}, and was {before}; {advice}")
        seen = number + 1
        if seen == progress.frames and frame.number is not None and progress.fingerprint:
            _warn_of_other(frame, progress.fingerprint, transform)
        if seen > progress.frames:
            yield frame
    if seen < num_known:
        within = "" if stream.options.limit is None else f" within --limit {stream.options.limit}"
        holds = f"{stream.name} holds {counted(seen, 'frame')}{within}"
        raise UsageError(f"{holds}, and the run had seen {num_known}; {advice}")


def _warn_of_other(frame: Frame, before: str, transform: Callable[[Image], Tensor]) -> None:
    """Warn if the last video frame seen has changed; not an error, since decoders differ slightly."""
    with contextlib.suppress(FrameError):  # then it was unreadable before, too
        if fingerprint(transform(frame.load())) != before:
            text = "frame %s of %s is not what it was when the run stopped: is it another video, or another decoder?"
            _log.warning(text, frame.number, frame.source)
