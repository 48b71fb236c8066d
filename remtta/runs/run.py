"""One pass over a stream, and the files it leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from remtta.deltas import DELTA
from remtta.deltas.delta import Delta, save_delta
from remtta.errors import DeltaError, OutputError, RemttaError, StreamError, UsageError
from remtta.files import FolderLock, Reserve, remove_leftovers, write_json, writing
from remtta.guard.guard import describe, guarded
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig
from remtta.models.config import origin_of
from remtta.models.labels import labels_of
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.options import RunOptions
from remtta.runs.budget import OUT_OF_TIME, Budget, Latencies
from remtta.runs.environment import environment
from remtta.runs.folder import (
    EVENTS,
    PREDICTIONS,
    RECORD,
    RESERVE,
    STATE,
    check_folder,
    check_nothing_lost,
    claim_folder,
)
from remtta.runs.interrupts import Interrupts, Stopped
from remtta.runs.journal import PredictionWriter, ReaderGone
from remtta.runs.place import Place, check_same_run, load_place, read_record, save_place, unseen_frames
from remtta.runs.rows import prediction_rows
from remtta.runs.states import take_back
from remtta.runs.summary import RunSummary
from remtta.streams.batches import Batches
from remtta.streams.fitness import not_to_learn_from
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream

RECORD_BYTES = 65_536  # more than a run.json, a delta's or a state's header takes
MOST_RESERVED_BYTES = 64 * 1024**2  # a method that changes all weights would ask for gigabytes
SLOW_SAVE_S = 0.5
SAVING_SHARE = 20  # a state that takes longer to save is saved so seldom that it costs 1 / 20 of the time
PATIENCE_S = 2.0  # a batch that takes longer is not waited for when told to stop

_log = logging.getLogger("remtta")


class GuardStop(Exception):
    """The guard's retries are used up, and it is to end the run."""


class Run:
    """One pass over a stream and the files it leaves; `adapt_stream` sets it up."""

    def __init__(
        self,
        model: nn.Module,
        adapter: Method,
        stream: Stream,
        folder: Path,
        method: str,
        config: MethodConfig,
        options: RunOptions,
        start: Delta | None,
        learned: dict[str, Any] | None,
        base_sha256: str,
    ) -> None:
        self.adapter, self.stream, self.folder = adapter, stream, folder
        self.method, self.config, self.options, self.start = method, config, options, start
        self.learned, self.base_sha256 = learned, base_sha256
        self.preprocessing: Preprocessing = preprocessing_of(model)
        self.labels, self.origin = labels_of(model), origin_of(model)
        self.device = next(model.parameters()).device
        self.num_classes = int(model.num_classes)  # type: ignore[arg-type]
        self.summary = RunSummary(folder, Place(frames_in_delta=start.frames if start else 0))
        self.between_batches = True  # no update has begun whose predictions are not written
        self.batch_seconds = math.inf
        self.saved_at = time.monotonic()
        self.saving_seconds = 0.0
        self.committed = adapter.committed  # as of the last batch whose predictions are written
        self.saves_delta = adapter.norms_only or options.save_full
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.environment = environment(self.device)
        _log.debug("preprocessing: %s", self.preprocessing)
        _log.debug("base weights: sha256 %s, on %s", base_sha256, self.device)
        self.writer: PredictionWriter | None = None
        self.events: PredictionWriter | None = None
        self.guard = guarded(adapter, options.guard, config)
        self.reserve: Reserve | None = None
        self.lock: FolderLock | None = None
        self.budget, self.latencies = Budget(options.max_ms, options.realtime), Latencies()
        self.dropped_before = 0
        self.last_frame: str | None = None  # time at which a frame was last predicted
        self.lag_s: float | None = None  # age of a live source's oldest frame in the last batch, once predicted

    @property
    def place(self) -> Place:
        """Where it is."""
        return self.summary.place

    def execute(
        self, echo: BinaryIO | None, on_batch: Callable[[RunSummary], None] | None, interrupts: Interrupts
    ) -> RunSummary:
        started, begun, refused = time.monotonic(), False, False
        try:
            with interrupts.held():
                self._resume(echo)
            started -= self.place.seconds
            self._stop_if_retired()
            batches = Batches(self.stream, self.options, self.preprocessing)
            unseen = unseen_frames(self.stream, self.place)
            decoded = batches.decoded(unseen, first=self.place.frames, wait=interrupts.check)
            with contextlib.closing(self.stream), contextlib.closing(decoded) as frames:
                first = next(frames, None)
                if first is None and not self.summary.num_resumed:
                    raise StreamError(f"{self.stream.name}: the stream held no frames")
                with interrupts.held():  # a folder claimed by half could not be finished
                    writer = self._claim(echo)
                    self._write_record()
                    if first and first.read_at and self.summary.num_resumed:
                        self._write_event(first.index, {"event": "resumed"})
                    begun = True
                for batch in batches.of(itertools.chain([first] if first else [], frames)):
                    self._process(batch, writer, interrupts)
                    self.place.seconds = time.monotonic() - started
                    if on_batch:
                        on_batch(self.summary)
            if self.summary.num_predicted == 0:
                raise StreamError(
                    f"{self.stream.name}: none of {self.summary.num_frames} frame(s) could be read (see {PREDICTIONS})"
                )
            self.summary.exit_reason = "completed"
        except Stopped as stop:
            self.summary.exit_reason, self.summary.signum = stop.name, stop.signum
        except ReaderGone:
            self.summary.exit_reason = "closed pipe"
        except GuardStop:
            self.summary.exit_reason = "guard"
        except BaseException as error:
            self._failed(error)
            refused = isinstance(error, UsageError) and not begun  # what an earlier run left stays as it is
            if isinstance(error, StreamError) and self.stream.live:
                with interrupts.held(), contextlib.suppress(OutputError):  # the first error is the one to tell
                    self._write_event(self.summary.num_frames, {"event": "lost", "reason": str(error)})
            raise
        finally:
            self.place.seconds = time.monotonic() - started
            with interrupts.finishing(), contextlib.ExitStack() as last:
                last.callback(self._let_go)
                if (self.writer or self.summary.signum is not None) and not refused:
                    self._finish()
        return self.summary

    def health(self) -> dict[str, Any]:
        """How the run is, at any moment and from any thread."""
        summary, live = self.summary, self.stream.live_source
        ended = summary.exit_reason != "running"
        return {
            "state": self._ended() if ended or live is None else live.state,
            **({"reason": summary.exit_reason} if ended and self._ended() == "error" else {}),
            "frames": summary.num_frames,
            "skipped": summary.num_skipped,
            "updates": summary.num_updates,
            "last_frame": self.last_frame,
            "lag_s": self.lag_s,
            "guard": self.guard.standing if self.guard else None,
            "guard_alarms": self.guard.total_alarms if self.guard else None,
            **self._live_counts(),
        }

    def _ended(self) -> str:
        """How the run ended, in a word or two."""
        return self.summary.exit_reason.partition(":")[0]

    def _claim(self, echo: BinaryIO | None = None) -> PredictionWriter:
        """Make the folder this run's, once."""
        if self.writer is None:
            if self.options.resume:
                check_nothing_lost(self.folder)
            else:
                check_folder(self.folder, overwrite=self.options.overwrite)
            self._lock()
            claim_folder(self.folder, overwrite=self.options.overwrite or self.options.resume)
            return self._begin(PredictionWriter(self.folder / PREDICTIONS, echo, durable=True))
        return self.writer

    def _resume(self, echo: BinaryIO | None) -> None:
        """Go on with the run in the folder, if that is asked for and there is one."""
        if not (self.options.resume and (self.folder / RECORD).exists()):
            return
        self._lock()
        record = read_record(self.folder / RECORD)
        check_same_run(record, self._record())
        place, state = load_place(self.folder / STATE)
        if state:
            take_back(self.folder / STATE, state, *([self.guard] if self.guard else []), self.adapter)
            self.committed = self.adapter.committed
        predictions = self.folder / PREDICTIONS
        writer = PredictionWriter(predictions, echo, keep_bytes=place.num_bytes, keep_tail=True, durable=True)
        if self.stream.live:  # what came after the last save cannot be seen again
            place.count(writer.unsaved_rows())
        self.summary.place, self.dropped_before = place, place.dropped
        self.summary.num_alarms = self.guard.total_alarms if self.guard else 0
        self.summary.num_resumed = record.get("resumed", 0) + 1
        self.started = record.get("timing", {}).get("started", self.started)
        self.latencies.before = record.get("timing", {}).get("latency_ms")
        self._begin(writer, place.event_bytes)
        _log.info("going on with %s after %d frames and %d updates", self.folder, place.frames, place.updates)

    def _lock(self) -> None:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(self.folder)
        remove_leftovers(self.folder, (DELTA, STATE, RECORD))

    def _begin(self, writer: PredictionWriter, event_bytes: int = 0) -> PredictionWriter:
        self.writer = writer
        if self.guard or self.stream.live:
            keep_tail = self.summary.num_resumed > 0
            path = self.folder / EVENTS
            event_bytes = event_bytes if path.exists() else 0  # decisions that somebody deleted are only reported
            self.events = PredictionWriter(path, keep_bytes=event_bytes, keep_tail=keep_tail, durable=True)
            if self.stream.live:
                self.events.unsaved_rows()
        delta, state = (
            sum(tensor.nbytes for tensor in tensors.values()) for tensors in (self.committed[0], self.adapter.state())
        )
        # An optimizer's state comes with its first step, up to two more values per weight; the guard's with its frames.
        room = delta + state + 2 * delta + 3 * RECORD_BYTES
        if self.guard:
            room += self.guard.most_bytes(3 * math.prod(self.preprocessing.input_size), self.num_classes)
        self.reserve = Reserve(self.folder / RESERVE, min(room, MOST_RESERVED_BYTES))
        return writer

    def _let_go(self) -> None:
        for writer in (self.writer, self.events):
            if writer:
                writer.close()
        if self.reserve:
            self.reserve.release()
        if self.lock:
            self.lock.release()

    def _failed(self, error: BaseException) -> None:
        self.summary.exit_reason = f"error: {error}" if isinstance(error, RemttaError) else f"error: {error!r}"

    def _process(self, batch: list[DecodedFrame], writer: PredictionWriter, interrupts: Interrupts) -> None:
        images = [frame.image for frame in batch if frame.image is not None]
        # A quick batch is finished before a stop, so that the method's state can be saved.
        with interrupts.held() if self.batch_seconds < PATIENCE_S else contextlib.nullcontext():
            started = time.monotonic()
            self.between_batches = False
            if images and self._reset_is_due():
                self._reset()
            update = self.adapter.num_updates  # since the last reset
            unfit, fingerprint = self._unfit(batch)
            if images and self.adapter.adapts and not self.budget.allows(batch):
                unfit = {frame.index: OUT_OF_TIME for frame in batch if frame.image is not None} | unfit
            logits = self._predict(torch.stack(images), batch, unfit) if images else None
            by_source = bool(images) and self.guard is not None and self.guard.from_source
            self.latencies.add(time.monotonic() - started, len(images))
            write = functools.partial(self._write, writer, batch, logits, update, unfit, by_source=by_source)
            if self.options.latency:
                with interrupts.held():
                    write(adapted=self.adapter.adapts and not (self.guard and self.guard.retired))
                    writer.echo(interrupts)
                # After a stop from here on, the saved state is behind; a resumed run makes these predictions again.
                (self.guard or self.adapter).learn()
            after = self.adapter.num_updates
            adapted = after > update or 0 < after < update  # some methods go back to the source by themselves
            self.batch_seconds = time.monotonic() - started
            self.budget.note(self.batch_seconds, len(batch), adapted=adapted)
            with interrupts.held():
                if not self.options.latency:
                    write(adapted=adapted)
                self.committed = self.adapter.committed
                self.between_batches = True
                place = self.place
                if after < update:
                    place.frames_in_delta = place.frames_since_reset = 0
                if adapted:
                    place.frames_in_delta += len(images) - len(unfit)
                    place.frames_since_reset += len(images) - len(unfit)
                place.not_adapted += len(unfit)
                place.by_source += by_source * len(images)
                place.fingerprint = fingerprint
                self.summary.num_alarms = self.guard.total_alarms if self.guard else 0
                self._write_events(batch)
                self._count_updates(after - update if after >= update else 1)  # the step that was undone
                if not self.options.latency:
                    writer.echo(interrupts)
        self._stop_if_retired()
        broken = next((frame for frame in batch if frame.error), None)
        if broken and self.options.on_error == "stop":
            raise StreamError(f"{broken.source}: {broken.error} (frame {broken.index}; --on-error skip goes on)")

    def _stop_if_retired(self) -> None:
        if self.guard and self.guard.retired and self.guard.options.action == "stop":
            raise GuardStop

    def _reset(self) -> None:
        self.adapter.reset()
        if self.guard:
            self.guard.reset()
        self.place.frames_in_delta = self.place.frames_since_reset = 0

    def _unfit(self, batch: list[DecodedFrame]) -> tuple[dict[int, str], str | None]:
        """Why which frames are not adapted on, by index, and the last frame's fingerprint."""
        return not_to_learn_from(batch, self.place.fingerprint) if self.adapter.adapts else ({}, None)

    def _write_events(self, batch: list[DecodedFrame]) -> None:
        """Gaps, and what the guard decided, as lines of the events file; the guard's as messages, too."""
        if self.events is None:
            return
        for frame in batch:
            if frame.gap:
                self.place.gaps += 1
                gap = {"event": "gap", "source": frame.source, **dataclasses.asdict(frame.gap)}
                self._write_event(frame.index, gap)
        for event in self.guard.events() if self.guard else []:
            self._write_event(batch[0].index, event)
            level = logging.DEBUG if event["event"] in ("doubt", "trust", "pardon") else logging.WARNING
            _log.log(level, "frame %d: %s", batch[0].index, describe(event))

    def _write_event(self, index: int, event: dict[str, Any]) -> None:
        if self.events:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.events.write([{"time": now, "frame": index, **event}])

    def _write(
        self,
        writer: PredictionWriter,
        batch: list[DecodedFrame],
        logits: Tensor | None,
        update: int,
        unfit: Mapping[int, str],
        *,
        adapted: bool,
        by_source: bool,
    ) -> None:
        """A batch's predictions, made after so many updates; `unfit` says why which frames are not adapted on."""
        rows = prediction_rows(
            batch,
            logits,
            update=0 if by_source else update,
            adapted=adapted,
            not_adapted=unfit,
            by_source=by_source,
            labels=self.labels,
            topk=self.options.topk,
            with_logits=self.options.logits,
        )
        agreed = writer.num_changed == 0
        writer.write(rows)
        self._count(batch)
        if agreed and writer.num_changed:
            _log.warning(
                "from frame %d on, some predictions differ from those made before the run was stopped, which stay; "
                "another machine, device or number of threads?",
                next(row["index"] for row in rows if "index" in row),
            )

    def _reset_is_due(self) -> bool:
        every = self.options.reset_every
        return self.config.episodic or (every is not None and self.place.frames_since_reset >= every)

    def _predict(self, images: Tensor, batch: list[DecodedFrame], unfit: Mapping[int, str]) -> Tensor:
        """Logits of a batch, from before the update on those of its frames that are fit for one."""
        pixels = self.preprocessing.normalise(images.to(self.device, non_blocking=True))
        if unfit:
            fit = torch.tensor([frame.index not in unfit for frame in batch if frame.image is not None])
            logits = self._predict_parts(pixels, fit).cpu()
        else:
            logits = self._step(pixels).cpu()
        if not torch.isfinite(logits).all():
            raise RemttaError(
                f"the model's outputs are not finite numbers from frame {batch[0].index} on; "
                "use a lower --lr, or check the checkpoint"
            )
        return logits

    def _step(self, pixels: Tensor) -> Tensor:
        """Predict and adapt, or only predict where the update is to come when the predictions are written."""
        step = self.guard or self.adapter
        return step.answer(pixels) if self.options.latency else step(pixels)

    def _predict_parts(self, pixels: Tensor, fit: Tensor) -> Tensor:
        """Predict all, adapt on some; `fit` (B,) is on the CPU. The guard answers with the source for all or none."""
        if not fit.any():
            return (self.guard or self.adapter).predict(pixels)
        others = self.adapter.predict(pixels[~fit])  # before the update; the guard decides after it
        logits = others.new_empty(len(fit), others.shape[1])
        logits[fit] = self._step(pixels[fit]).to(logits)
        if self.guard and self.guard.from_source:
            others = self.guard.method.predict_source(pixels[~fit])
        logits[~fit] = others
        return logits

    def _count(self, batch: list[DecodedFrame]) -> None:
        self.place.frames += len(batch)
        now, read_at = datetime.now(UTC), batch[0].read_at
        self.last_frame = now.isoformat(timespec="seconds")
        self.lag_s = None if read_at is None else round((now - datetime.fromisoformat(read_at)).total_seconds(), 3)
        self.place.skipped += sum(frame.image is None for frame in batch)
        self.place.last = batch[-1].source, batch[-1].number
        if self.options.on_error == "skip":
            for frame in batch:
                if frame.error:
                    _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)

    def _count_updates(self, new_updates: int) -> None:
        if new_updates:
            before, every = self.place.updates, self.options.save_every
            self.place.updates += new_updates
            if before // every != self.place.updates // every:
                slow = self.saving_seconds > SLOW_SAVE_S
                if not slow or time.monotonic() - self.saved_at > SAVING_SHARE * self.saving_seconds:
                    self._save_state()
                self._save_delta()
                self._write_record()

    def _finish(self) -> None:
        self._claim()
        if self.reserve:
            self.reserve.release()
        try:
            with contextlib.ExitStack() as saves:  # each is tried, whatever becomes of the other
                if self.between_batches:
                    saves.callback(self._save_state)
                saves.callback(self._save_delta)
        except OutputError as error:
            self._failed(error)
            raise
        finally:
            self._write_record()

    def _save_state(self) -> None:
        self.place.dropped = self._num_dropped()
        self.place.num_bytes = self._claim().sync()
        self.place.event_bytes = self.events.sync() if self.events else 0
        started = time.monotonic()
        state = {**self.adapter.state(), **(self.guard.state() if self.guard else {})}
        save_place(self.folder / STATE, self.place, state)
        self.saved_at = time.monotonic()
        self.saving_seconds = self.saved_at - started

    def _save_delta(self) -> None:
        tensors, updates = self.committed
        if not tensors or not self.saves_delta:
            return
        delta = Delta(
            tensors={name: tensor.cpu() for name, tensor in tensors.items()},
            model=self.origin["name"],
            base_sha256=self.base_sha256,
            method=self.method,
            hyperparameters=self._hyperparameters(),
            frames=self.place.frames_in_delta,
            updates=updates,
            model_options={key: value for key, value in self.origin.items() if key != "name"},
            preprocessing=self.preprocessing.as_dict(),
        )
        try:
            save_delta(self.folder / DELTA, delta)
        except DeltaError as error:  # the outputs will show it, and stop the run
            _log.warning("%s; the delta saved before stays", error)
        else:
            _log.debug("saved the delta after %d updates", updates)

    def _guard_record(self) -> dict[str, Any] | None:
        if self.guard is None:
            return None
        return {
            "alarms": self.guard.total_alarms,
            "retired": self.guard.retired,
            "answered_by_source": self.place.by_source,
        }

    def _live_counts(self) -> dict[str, int]:
        return {"dropped": self._num_dropped(), "gaps": self.place.gaps} if self.stream.live else {}

    def _num_dropped(self) -> int:
        """Frames that were dropped for newer ones, in all parts of the run."""
        live = self.stream.live_source
        return self.dropped_before + (live.dropped if live else 0)

    def _hyperparameters(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.config), "batch_size": self.options.batch_size}

    def _write_record(self) -> None:
        write_json(self.folder / RECORD, self._record())

    def _record(self) -> dict[str, Any]:
        summary, live = self.summary, self.stream.live_source
        return {
            "exit_reason": summary.exit_reason,
            "resumed": summary.num_resumed,
            "counts": {
                "frames": summary.num_frames,
                "predicted": summary.num_predicted,
                "skipped": summary.num_skipped,
                "updates": summary.num_updates,
                "not_adapted": self.place.not_adapted,
                **self._live_counts(),
            },
            "timing": {
                "started": self.started,
                "seconds": round(summary.seconds, 3),
                "images_per_s": round(summary.images_per_s, 2),
                "latency_ms": self.latencies.percentiles_ms(),  # of a full batch, since the run began or went on
            },
            "source": {
                "name": self.stream.name,
                "kind": self.stream.kind,
                "num_frames": self.stream.num_frames,
                **({"live": dataclasses.asdict(live.options)} if live else {}),
            },
            "model": {
                **self.origin,
                "num_classes": self.num_classes,
                "base_sha256": self.base_sha256,
                "start_delta": None if self.start is None else self.start.origin,
            },
            "preprocessing": self.preprocessing.as_dict(),
            "method": {"name": self.method, **self._hyperparameters()},
            "source_statistics": self.learned,
            "guard": self._guard_record(),
            "options": {key: value for key, value in dataclasses.asdict(self.options).items() if key != "batch_size"},
            "adapted": list(self.adapter.adapted_names),
            "environment": self.environment,
        }
