"""The main job: read a stream, predict, adapt, and write down what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from remtta.config import REMConfig, RunOptions
from remtta.deltas import Delta, check_base, save_delta
from remtta.errors import DeltaError, RemttaError, StreamError
from remtta.files import write_json
from remtta.interrupts import Interrupts, Stopped
from remtta.methods import Method, build_method
from remtta.models import Preprocessing, labels_of, preprocessing_of, state_sha256
from remtta.predictions import PredictionWriter, ReaderGone, prediction_rows
from remtta.runs import DELTA, PREDICTIONS, RECORD, claim_folder, default_folder, environment
from remtta.streams import Stream, open_stream
from remtta.streams.prefetch import DecodedFrame, prefetch

BATCHES_AHEAD = 2  # decoded frames waiting for the model, in batches

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
    config: REMConfig | None = None,
    options: RunOptions | None = None,
    delta: Delta | None = None,
    echo: BinaryIO | None = None,
    on_batch: Callable[[RunSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> RunSummary:
    """Predict every frame of a stream, and adapt the model to it on the way.

    Writes `predictions.jsonl` (one line per frame, in order), `delta.safetensors`
    and `run.json` into the output folder.

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
        UsageError: If the source does not exist or the folder holds another run.
        StreamError: If the source yields no readable frame.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    options = options or RunOptions()
    stream = source if isinstance(source, Stream) else open_stream(source)
    folder = default_folder() if output is None else Path(output)
    base_sha256 = state_sha256(model)
    adapter = build_method(method, model, config or REMConfig())
    if delta is not None:
        check_base(delta, base_sha256)
        adapter.load_delta(delta.tensors, delta.updates)
    claim_folder(folder, overwrite=options.overwrite)
    run = _Run(model, adapter, stream, folder, method, config or REMConfig(), options, delta, base_sha256)
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
        config: REMConfig,
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
        self.started = datetime.now(UTC)
        self.environment = environment(self.device)

    def execute(
        self, echo: BinaryIO | None, on_batch: Callable[[RunSummary], None] | None, interrupts: Interrupts
    ) -> RunSummary:
        started = time.monotonic()
        self._write_record()
        try:
            with (
                PredictionWriter(self.folder / PREDICTIONS, echo) as writer,
                contextlib.closing(self._batches(interrupts)) as batches,
            ):
                for batch in batches:
                    self._process(batch, writer, interrupts)
                    self.summary.seconds = time.monotonic() - started
                    if on_batch:
                        on_batch(self.summary)
            if self.summary.num_predicted == 0:
                raise StreamError(self._nothing_readable())
            self.summary.exit_reason = "completed"
        except Stopped as stop:
            self.summary.exit_reason, self.summary.signum = stop.name, stop.signum
        except ReaderGone:
            self.summary.exit_reason = "closed pipe"
        except BaseException as error:
            self.summary.exit_reason = f"error: {error}" if isinstance(error, RemttaError) else f"error: {error!r}"
            raise
        finally:
            with interrupts.finishing():
                self._finish(time.monotonic() - started)
        return self.summary

    def _batches(self, interrupts: Interrupts) -> Generator[list[DecodedFrame]]:
        """Batches of `batch_size` readable frames, unreadable ones in their places between them."""
        size = self.options.batch_size
        transform = self.preprocessing.transform()
        frames = prefetch(self.stream.frames, transform, ahead=BATCHES_AHEAD * size, wait=interrupts.check)
        batch: list[DecodedFrame] = []
        readable = 0
        with contextlib.closing(frames):
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
        update = self.adapter.num_updates
        logits = self._predict(torch.stack(images), batch) if images else None
        with interrupts.held():
            writer.write(
                prediction_rows(
                    batch,
                    logits,
                    update=update,
                    adapted=self.adapter.adapts,
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
        for frame in batch:
            if frame.error:
                _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)
        if num_images and self.adapter.adapts:
            before, self.summary.num_updates = (
                self.summary.num_updates,
                (self.summary.num_updates + self.adapter.num_updates - update),
            )
            self.frames_in_delta += num_images
            self.frames_since_reset += num_images
            every = self.options.save_every
            if before // every != self.summary.num_updates // every:
                self._save_delta()

    def _finish(self, seconds: float) -> None:
        self.summary.seconds = seconds
        self._save_delta()
        self._write_record()

    def _save_delta(self) -> None:
        tensors, updates = self.committed
        if not tensors:
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
        )
        try:
            save_delta(self.folder / DELTA, delta)
        except DeltaError as error:  # the outputs will show it, and stop the run
            _log.warning("%s; the delta saved before stays", error)

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
                    "start_delta": None if self.start is None else self.start.created,
                },
                "preprocessing": self.preprocessing.as_dict(),
                "method": {"name": self.method, **self._hyperparameters()},
                "options": {
                    key: value
                    for key, value in dataclasses.asdict(self.options).items()
                    if key not in ("model", "batch_size")
                },
                "adapted": list(self.adapter.adapted_names),
                "seed": torch.initial_seed(),
                "environment": self.environment,
            },
        )

    def _nothing_readable(self) -> str:
        if self.summary.num_frames == 0:
            return f"{self.stream.name}: the stream held no frames"
        return f"{self.stream.name}: none of {self.summary.num_frames} frame(s) could be read (see {PREDICTIONS})"
