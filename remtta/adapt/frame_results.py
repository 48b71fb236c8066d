"""A stream's predictions, frame by frame, by an adapter."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from remtta.adapt.adapter import Adapter
from remtta.errors import StreamError, UsageError
from remtta.interrupts import Interrupts
from remtta.runs.budget import LearnableFrames, TimeBudget
from remtta.runs.loop import AdaptationLoop, BatchResult, LoopCallback
from remtta.runs.summary import RunProgress
from remtta.streams.batches import Batches
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Source, Stream, open_stream

_log = logging.getLogger("remtta")


@dataclass(frozen=True, repr=False)
class Result:
    """The prediction for one frame.

    Attributes:
        index: Number of the frame in the stream, from 0.
        source: Its path, or the video, camera or address.
        time_s: Its time in a video, in seconds; None for stills.
        read_at: When it was read from a live source: UTC, ISO 8601.
        probs: Class probabilities (C,).
        labels: Class names, if known.
        adapted: Whether the frame entered an update, or will with the rest of its batch.
        frame: The decoded frame, which `image` shows.
    """

    index: int
    source: str
    time_s: float | None
    read_at: str | None
    probs: np.ndarray
    adapted: bool
    labels: Sequence[str] | None = None
    frame: DecodedFrame | None = None

    def __repr__(self) -> str:
        names = ("index", "source", "time_s", "read_at", "class_id", "label", "prob", "adapted")
        return f"Result({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def class_id(self) -> int:
        """The most likely class."""
        return int(self.probs.argmax())

    @property
    def label(self) -> str | None:
        """The name of the most likely class, if known."""
        return self.labels[self.class_id] if self.labels else None

    @property
    def prob(self) -> float:
        """The probability of the most likely class."""
        return float(self.probs.max())

    @property
    def top5(self) -> list[tuple[int, str | None, float]]:
        """Number, name and probability of the most likely classes."""
        best = np.argsort(-self.probs, kind="stable")[:5].tolist()
        return [(each, self.labels[each] if self.labels else None, float(self.probs[each])) for each in best]

    @property
    def image(self) -> Image.Image:
        """The frame as the model saw it, before normalisation."""
        assert self.frame is not None and self.frame.image is not None
        return Image.fromarray(self.frame.image.permute(1, 2, 0).numpy())


def stream(source: Stream | Source, adapter: Adapter) -> Iterator[Result]:
    """Predict a stream's frames and update on them; yield a result per frame, batch after batch.

    Frames of a camera or network stream that have waited 2 seconds for a full batch are yielded before it. Frames that
    cannot be read are left out, with a warning. Black and repeated frames of videos and cameras enter no update.

    Args:
        source: A stream, anything that `open_stream` takes, or the number of a camera.
        adapter: The adapter, which continues from its present state.

    Raises:
        UsageError: If there is no such source, or the model's preprocessing is not known.
        StreamError: If it fails, or has no readable frame; an empty list of paths just ends.
    """
    if not isinstance(adapter, Adapter):
        raise UsageError(f"stream needs a remtta.Adapter, got {type(adapter).__name__}")
    adapter.image_inputs.check_known()

    def run_exclusively(work: Callable[[], None]) -> None:
        with adapter.exclusive():
            work()

    opened = source if isinstance(source, Stream) else open_stream(source)
    batches, callback = Batches(opened.live_source, adapter.options, adapter.info.preprocessing), _FrameResults(adapter)
    progress = RunProgress()
    loop = AdaptationLoop(
        adapter.pipeline,
        adapter.info,
        progress,
        policy=LearnableFrames(progress, TimeBudget()),
        callback=callback,
        interrupts=Interrupts(),
        run_exclusively=run_exclusively,
    )
    decoded = batches.decoded(opened.frames, first=0, wait=lambda: None)
    with contextlib.closing(decoded), contextlib.closing(opened):
        for batch in batches.batched(decoded):
            loop.run([batch])
            yield from callback.results
    if progress.frames == 0:
        opened.check_not_empty()
    elif progress.frames == progress.skipped:
        raise StreamError(f"{opened.name}: no readable frame ({progress.frames} failed)")


class _FrameResults(LoopCallback):
    """Collects the results of a loop's last batch."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter, self._labels = adapter, adapter.info.labels
        self.results: list[Result] = []

    def on_batch_end(self, result: BatchResult) -> None:
        self._adapter.log_events()

    def on_prediction(self, result: BatchResult) -> None:
        for frame in result.batch.frames:
            if frame.error:
                _log.warning("skipped frame %d, %s: %s", frame.index, frame.source, frame.error)
        self.results = [
            Result(
                frame.index,
                frame.source,
                frame.time_s,
                frame.read_at,
                probs,
                result.adapted and frame.index not in result.excluded,
                self._labels,
                frame,
            )
            for frame, probs in zip(
                result.batch.readable, result.prediction.logits.float().softmax(-1).numpy(), strict=True
            )
        ]
