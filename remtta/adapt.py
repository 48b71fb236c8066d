"""The main job: read a stream, predict, adapt, and write down what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from remtta.config import MethodConfig, method_config
from remtta.deltas import Delta, check_base, save_delta
from remtta.environment import environment
from remtta.errors import DeltaError, OutputError, RemttaError, StreamError, UsageError
from remtta.files import FolderLock, Reserve, write_json, writing
from remtta.interrupts import Interrupts, Stopped
from remtta.methods import Method, build_method
from remtta.models import Preprocessing, labels_of, preprocessing_of, state_sha256
from remtta.options import RunOptions
from remtta.predictions import PredictionWriter, ReaderGone, prediction_rows
from remtta.runs import DELTA, PREDICTIONS, RECORD, RESERVE, check_folder, claim_folder, default_folder
from remtta.streams import Stream, open_stream
from remtta.streams.prefetch import DecodedFrame, prefetch

BATCHES_AHEAD = 2  # decoded frames waiting for the model, in batches
RECORD_BYTES = 65_536  # more than a run.json and a delta's header take

_log = logging.getLogger("remtta")


@dataclass
class RunSummary:
    """What a run came to.

    Attributes:
        output: The run's folder.
        num_frames: Frames seen, unreadable ones included.
        num_skipped: Frames that could not be read.
        num_updates: Optimizer steps taken.
        seconds: From the first frame asked for to the last file written.
        exit_reason: "completed", a signal's name, "closed pipe", or "error: ...".
        signum: The signal that stopped it, if one did.
    """

    output: Path
    num_frames: int = 0
    num_skipped: int = 0
    num_updates: int = 0
    seconds: float = 0.0
    exit_reason: str = "running"
    signum: int | None = None

    @property
    def num_predicted(self) -> int:
        """Frames with a prediction."""
        return self.num_frames - self.num_skipped

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, decoding and writing included."""
        return self.num_predicted / self.seconds if self.seconds else 0.0

    def report(self) -> str:
        """A few lines for a person."""
        how = "" if self.exit_reason == "completed" else f", ended early: {self.exit_reason}"
        lines = [
            f"{self.num_frames} frames, {self.num_predicted} predicted, {self.num_skipped} skipped, "
            f"{self.num_updates} updates, {self.images_per_s:.1f} images/s{how}",
            *(str(path) for path in (self.output / PREDICTIONS, self.output / DELTA) if path.exists()),
        ]
        return "\n".join(lines)


def adapt_stream(
    model: nn.Module,
    source: Stream | str | Path | Iterable[str | Path],
    output: str | Path | None = None,
    *,
    method: str = "rem",
    config: MethodConfig | None = None,
    options: RunOptions | None = None,
    delta: Delta | None = None,
    echo: BinaryIO | None = None,
    on_batch: Callable[[RunSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> RunSummary:
    """Predict every frame of a stream, and adapt the model to it on the way.

    Writes `predictions.jsonl` (one line per frame, in order), `delta.safetensors`
    and `run.json` into the output folder. A source that yields no frame at all
    leaves nothing behind. Of a method that changes every weight a delta is
    written only with `save_full`.

    Args:
        model: A timm classifier, as from `load_model`; adapted in place.
        source: A stream, anything `open_stream` takes, or paths.
        output: Folder for the results; by default `runs/<UTC time>`.
        method: Name of the adaptation method: "rem", or "source" for none.
        config: The method's settings.
        options: How the stream is run.
        delta: Start from these adapted weights.
        echo: A binary stream that gets the prediction lines as well.
        on_batch: Called after every batch with the counts so far.
        interrupts: Turns signals into a clean stop.

    Returns:
        The counts and the reason why the run ended. A signal or a closed pipe
        ends it early without an exception.

    Raises:
        UsageError: If the source does not exist, the folder holds another run,
            or `save_full` asks for what the method cannot save.
        StreamError: If the source yields no readable frame.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    options = options or RunOptions()
    torch.manual_seed(options.seed)
    config = config or method_config(method, {}, batch_size=options.batch_size)
    stream = source if isinstance(source, Stream) else open_stream(source)
    folder = default_folder() if output is None else Path(output)
    check_folder(folder, overwrite=options.overwrite)
    base_sha256 = state_sha256(model)
    adapter = build_method(method, model, config)
    if adapter.needs_labels:
        raise UsageError(f"{method} learns from labels, which a stream has none of; use it in remtta eval")
    if options.save_full and adapter.delta_refusal:
        raise UsageError(f"{adapter.delta_refusal}, so there is nothing for --save-full; leave it out")
    if delta is not None:
        check_base(delta, base_sha256)
        adapter.load_delta(delta.tensors, delta.updates)
    if options.reset_every is not None and options.reset_every < options.batch_size:
        _log.warning(
            "a reset every %d frames, with %d frames per update, is one before every batch",
            options.reset_every,
            options.batch_size,
        )
    _log.debug(
        "%s adapts %d tensors, %s", method, len(adapter.adapted_names), ", ".join(adapter.adapted_names) or "none"
    )
    if not adapter.norms_only and not options.save_full and not adapter.delta_refusal:
        megabytes = sum(tensor.nbytes for tensor in adapter.committed[0].values()) / 1e6
        _log.warning(
            "%s changes every weight, so no %s is written; --save-full writes one, of %.0f MB", method, DELTA, megabytes
        )
    run = _Run(model, adapter, stream, folder, method, config, options, delta, base_sha256)
    return run.execute(echo, on_batch, interrupts or Interrupts())


class _Run:
    """One pass over a stream and the files it leaves."""

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
        base_sha256: str,
    ) -> None:
        self.adapter, self.stream, self.folder = adapter, stream, folder
        self.method, self.config, self.options, self.start = method, config, options, start
        self.base_sha256 = base_sha256
        self.preprocessing: Preprocessing = preprocessing_of(model)
        self.labels = labels_of(model)
        self.device = next(model.parameters()).device
        self.num_classes = int(model.num_classes)  # type: ignore[arg-type]
        self.summary = RunSummary(folder)
        self.frames_in_delta = start.frames if start else 0
        self.frames_since_reset = 0
        self.committed = adapter.committed  # as of the last batch whose predictions are written
        self.saves_delta = adapter.norms_only or options.save_full
        self.started = datetime.now(UTC)
        self.environment = environment(self.device)
        _log.debug("preprocessing: %s", self.preprocessing)
        _log.debug("base weights: sha256 %s, on %s", base_sha256, self.device)
        self.reserve: Reserve | None = None
        self.lock: FolderLock | None = None

    def execute(
        self, echo: BinaryIO | None, on_batch: Callable[[RunSummary], None] | None, interrupts: Interrupts
    ) -> RunSummary:
        started = time.monotonic()
        try:
            with contextlib.closing(self._frames(interrupts)) as frames:
                first = next(frames, None)
                if first is None:
                    raise StreamError(f"{self.stream.name}: the stream held no frames")
                with interrupts.held():  # a folder claimed by half could not be finished
                    self._claim()
                with PredictionWriter(self.folder / PREDICTIONS, echo) as writer:
                    for batch in self._batches(itertools.chain([first], frames)):
                        self._process(batch, writer, interrupts)
                        self.summary.seconds = time.monotonic() - started
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
        except BaseException as error:
            self._failed(error)
            raise
        finally:
            self.summary.seconds = time.monotonic() - started
            with interrupts.finishing():
                try:
                    if self.reserve or self.summary.signum is not None:
                        self._finish()
                finally:
                    if self.lock:
                        self.lock.release()
        return self.summary

    def _claim(self) -> Reserve:
        """Make the folder this run's, once."""
        if self.reserve is None:
            check_folder(self.folder, overwrite=self.options.overwrite)
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FolderLock(self.folder)
            claim_folder(self.folder, overwrite=self.options.overwrite)
            size = sum(tensor.nbytes for tensor in self.committed[0].values()) if self.saves_delta else 0
            self.reserve = Reserve(self.folder / RESERVE, 2 * size + 2 * RECORD_BYTES)
            self._write_record()
        return self.reserve

    def _failed(self, error: BaseException) -> None:
        self.summary.exit_reason = f"error: {error}" if isinstance(error, RemttaError) else f"error: {error!r}"

    def _frames(self, interrupts: Interrupts) -> Generator[DecodedFrame]:
        ahead = BATCHES_AHEAD * self.options.batch_size
        return prefetch(self.stream.frames, self.preprocessing.transform(), ahead=ahead, wait=interrupts.check)

    def _batches(self, frames: Iterable[DecodedFrame]) -> Iterator[list[DecodedFrame]]:
        """Batches of `batch_size` readable frames, unreadable ones in their places between them."""
        size = self.options.batch_size
        batch: list[DecodedFrame] = []
        readable = 0
        for frame in frames:
            batch.append(frame)
            readable += frame.image is not None
            # An unreadable frame that no readable one waits for need not wait either.
            if readable in (0, size) or (frame.error and self.options.on_error == "stop"):
                yield batch
                batch, readable = [], 0
        if batch:
            yield batch

    def _process(self, batch: list[DecodedFrame], writer: PredictionWriter, interrupts: Interrupts) -> None:
        images = [frame.image for frame in batch if frame.image is not None]
        afresh = bool(images) and self._reset_is_due()
        if afresh:
            self.adapter.reset()
        update = self.adapter.num_updates  # since the last reset
        logits = self._predict(torch.stack(images), batch) if images else None
        with interrupts.held():
            writer.write(
                prediction_rows(
                    batch,
                    logits,
                    update=update,
                    adapted=self.adapter.num_updates > update,
                    labels=self.labels,
                    topk=self.options.topk,
                    with_logits=self.options.logits,
                )
            )
            self.committed = self.adapter.committed
            if afresh:
                self.frames_in_delta = self.frames_since_reset = 0
            self._count(batch, len(images), update)
            writer.echo()
        broken = next((frame for frame in batch if frame.error), None)
        if broken and self.options.on_error == "stop":
            raise StreamError(f"{broken.source}: {broken.error} (frame {broken.index}; --on-error skip goes on)")

    def _reset_is_due(self) -> bool:
        every = self.options.reset_every
        return self.config.episodic or (every is not None and self.frames_since_reset >= every)

    def _predict(self, images: Tensor, batch: list[DecodedFrame]) -> Tensor:
        pixels = images.to(self.device, non_blocking=True)
        logits = self.adapter(self.preprocessing.normalise(pixels)).cpu()
        if not torch.isfinite(logits).all():
            raise RemttaError(
                f"the model's outputs are not finite numbers from frame {batch[0].index} on; "
                "use a lower --lr, or check the checkpoint"
            )
        return logits

    def _count(self, batch: list[DecodedFrame], num_images: int, update: int) -> None:
        self.summary.num_frames += len(batch)
        self.summary.num_skipped += len(batch) - num_images
        if self.options.on_error == "skip":
            for frame in batch:
                if frame.error:
                    _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)
        new_updates = self.adapter.num_updates - update
        if new_updates:
            self.frames_in_delta += num_images
            self.frames_since_reset += num_images
            before, every = self.summary.num_updates, self.options.save_every
            self.summary.num_updates += new_updates
            if before // every != self.summary.num_updates // every:
                self._save_delta()

    def _finish(self) -> None:
        self._claim().release()
        try:
            self._save_delta()
        except OutputError as error:
            self._failed(error)
            raise
        finally:
            self._write_record()

    def _save_delta(self) -> None:
        tensors, updates = self.committed
        if not tensors or not self.saves_delta:
            return
        delta = Delta(
            tensors={name: tensor.cpu() for name, tensor in tensors.items()},
            model=str(self.options.model.get("name", "unknown")),
            base_sha256=self.base_sha256,
            method=self.method,
            hyperparameters=self._hyperparameters(),
            frames=self.frames_in_delta,
            updates=updates,
            model_options={key: value for key, value in self.options.model.items() if key != "name"},
            preprocessing=self.preprocessing.as_dict(),
        )
        try:
            save_delta(self.folder / DELTA, delta)
        except DeltaError as error:  # the outputs will show it, and stop the run
            _log.warning("%s; the delta saved before stays", error)
        else:
            _log.debug("saved the delta after %d updates", updates)

    def _hyperparameters(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.config), "batch_size": self.options.batch_size}

    def _write_record(self) -> None:
        summary = self.summary
        write_json(
            self.folder / RECORD,
            {
                "exit_reason": summary.exit_reason,
                "counts": {
                    "frames": summary.num_frames,
                    "predicted": summary.num_predicted,
                    "skipped": summary.num_skipped,
                    "updates": summary.num_updates,
                },
                "timing": {
                    "started": self.started.isoformat(timespec="seconds"),
                    "seconds": round(summary.seconds, 3),
                    "images_per_s": round(summary.images_per_s, 2),
                },
                "source": {"name": self.stream.name, "kind": self.stream.kind, "num_frames": self.stream.num_frames},
                "model": {
                    **self.options.model,
                    "num_classes": self.num_classes,
                    "base_sha256": self.base_sha256,
                    "start_delta": None if self.start is None else self.start.origin,
                },
                "preprocessing": self.preprocessing.as_dict(),
                "method": {"name": self.method, **self._hyperparameters()},
                "options": {
                    key: value
                    for key, value in dataclasses.asdict(self.options).items()
                    if key not in ("model", "batch_size")
                },
                "adapted": list(self.adapter.adapted_names),
                "environment": self.environment,
            },
        )
