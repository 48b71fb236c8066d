"""What `remtta adapt` does by default, as an object, and a stream's answers one by one."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from remtta.adapt.planning import Setup, own_guard, set_up
from remtta.deltas.delta import Delta
from remtta.engines.interrupts import Interrupts
from remtta.errors import UsageError
from remtta.guard.observed import ObservedMethod
from remtta.methods.settings import FULL_BATCH, METHOD_TABLE, check_method, method_config
from remtta.methods.settings.base import Optimizer, Precision
from remtta.methods.settings.rem_config import Masking
from remtta.models.card import card_of
from remtta.models.described import Described, Output
from remtta.models.inside import look_inside
from remtta.models.preprocessing import Preprocessing
from remtta.options import DEFAULT_BATCH_SIZE, GuardOptions, RunOptions
from remtta.options.guard_options import Action, Answer
from remtta.options.run_options import Smooth
from remtta.runs.batch import Batch, BatchResult, Counts
from remtta.runs.budget import TimeBudget
from remtta.runs.policy import FitFrames
from remtta.runs.session import Session
from remtta.runs.states import load_whole
from remtta.streams.batches import Batches
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream, open_stream

Images = Tensor | Sequence[Image.Image | np.ndarray]
"""Preprocessed float32 or raw uint8 images (B, 3, H, W) of the model's size; or pictures in RGB of any size."""

_FROZEN = "frozen"

_log = logging.getLogger("remtta")


class Settings(TypedDict, total=False):
    """Settings of methods, as the options of `remtta adapt` are called; those of the method's name where left out."""

    lr: float
    optimizer: Optimizer
    momentum: float
    steps: int
    anchor: float | str
    micro_batch: int
    adapt_layers: str
    precision: Precision
    mask_ratios: tuple[float, ...]
    ranking_weight: float
    margin: float
    masking: Masking


class Adapter(ObservedMethod):
    """A classifier that adapts to what it sees, as `remtta adapt` has it: method, guard, centred logits and all.

        adapter = remtta.Adapter(model)
        probs = adapter(images)  # (B, C); predicts, then learns

    Any number of threads may call it: it works for one at a time. The model is its own: nothing else, and no other
    adapter, may use it meanwhile, as its weights change in place and are the source's for moments.

    Attributes:
        card: What is known of the model: preprocessing, labels, classes.
        options: How it is run.
        config: The method's settings.

    Args:
        model: A classifier of images (B, 3, H, W); adapted in place, in eval mode.
        method: Name of the method.
        batch_size: Images of a call, or of a batch of `stream`. Of fewer than 20 the learning rate is less.
        output: From what the model returns to logits (B, C), where it returns something else.
        patch_size: Height and width of what masks leave out, in pixels; None for what suits the model.
        preprocessing: How pictures become its inputs; None for what the model says, or else ImageNet's.
        labels: Class names; None for what the model says.
        guard: What is done against harm; None for what goes with the method.
        answer: Who answers; None likewise.
        smooth: "auto" where calls and frames come in order, as on video.
        delta: Adapted weights to start from.
        source_data: Clean images without labels, for methods that learn from them first.
        seed: Of every random choice.
        settings: Of the method.

    Raises:
        ModelError: If the model cannot be adapted, with what to do.
        UsageError: If a method or setting is unknown, or a value is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str = "remtta",
        *,
        batch_size: int = DEFAULT_BATCH_SIZE,
        output: Output | None = None,
        patch_size: tuple[int, int] | None = None,
        preprocessing: Preprocessing | None = None,
        labels: Sequence[str] | None = None,
        guard: Action | None = None,
        answer: Answer | None = None,
        smooth: Smooth = "off",
        delta: Delta | None = None,
        source_data: str | Path | None = None,
        seed: int = 0,
        **settings: Unpack[Settings],
    ) -> None:
        check_method(method, METHOD_TABLE)
        given = Described(model, output, patch_size, preprocessing, labels)
        self.card = card_of(given)
        options = RunOptions(batch_size=batch_size, guard=GuardOptions(guard, answer), smooth=smooth, seed=seed)
        self.options = own_guard(method, options)
        config = method_config(method, settings, batch_size=batch_size)
        setup = Setup(method, config, self.options, delta, source_data)
        built, self.config, _ = set_up(given, self.card, setup, lambda: None)
        super().__init__(built.method, built.observers)
        self._lock = threading.RLock()
        self._warned = False
        inside = look_inside(given)
        self._guesses = preprocessing is None and not inside.is_timms and inside.front is None

    def __call__(self, images: Images) -> Tensor:
        """Predict images, then learn from them; return class probabilities (B, C), on the CPU.

        Raises:
            ValueError: If they are no batch of images.
        """
        pixels = self._pixels(images)
        with self._lock:
            self._warn_of_few(len(pixels))
            fit = torch.full((len(pixels),), self.method.adapts and not self.frozen)
            answers = self.predict(pixels, fit, left_out=self.left_out(pixels, fit) is not None)
        return answers.logits.float().softmax(-1).cpu()

    def in_turn(self, work: Callable[[], None]) -> None:
        """Do what needs the model while no other thread uses it."""
        with self._lock:
            work()

    def freeze(self) -> None:
        """Only predict from now on, with what was learned."""
        self.frozen = True

    def reset(self) -> None:
        """Go back to the source weights, exactly; a frozen adapter stays frozen."""
        with self._lock:
            super().reset()

    def delta(self) -> dict[str, Tensor]:
        """Return adapted minus source weights, by parameter name; the head's bias has what logits are centred by."""
        with self._lock:
            return self.method.delta()

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything the next answer depends on, on the CPU, ready for `torch.save` or safetensors."""
        with self._lock:
            return {**self.state(), _FROZEN: torch.tensor(self.frozen)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` returned, of an adapter of the same model and settings.

        Raises:
            UsageError: If it is of another.
        """
        with self._lock:
            try:
                load_whole({name: tensor for name, tensor in state.items() if name != _FROZEN}, self)
                self.frozen = bool(state[_FROZEN])
            except (ValueError, KeyError) as error:
                text = f"this is no state of an adapter of this model, method and settings ({error})"
                raise UsageError(text) from error

    def _pixels(self, images: Images) -> Tensor:
        """What the model takes, on its device."""
        if not isinstance(images, Tensor):
            transform = self.card.preprocessing.transform()
            images = torch.stack([transform(_picture(image)) for image in images])
        if images.dtype == torch.uint8:
            self.warn_of_guess()
            return self.card.preprocessing.normalise(images.to(self.card.device))
        return images.to(self.card.device)

    def warn_of_guess(self) -> None:
        """Tell once that nothing says how pictures become the model's inputs, where that is so."""
        if self._guesses:
            taken = self.card.preprocessing
            told = "the model does not say how pictures become its inputs: they get ImageNet's mean and deviation at "
            _log.warning("%s%d x %d; say otherwise by preprocessing=remtta.Preprocessing(...)", told, *taken.input_size)
            self._guesses = False

    def _warn_of_few(self, count: int) -> None:
        if count < min(FULL_BATCH, self.options.batch_size) and not self._warned and self.method.trains:
            told = "%d image(s) at a time, and the learning rate is for %d: say remtta.Adapter(model, batch_size=%d)"
            _log.warning(told, count, self.options.batch_size, count)
            self._warned = True


@dataclass(frozen=True)
class Result:
    """The answer to one frame.

    Attributes:
        index: Of the frame in the stream, from 0.
        source: A path, or the video, camera or address.
        time_s: In a video, in seconds; None for stills.
        read_at: Of a live source: when it was read, in UTC, ISO 8601.
        probs: Class probabilities (C,).
        labels: Class names, if there are some.
        adapted: Whether the frame entered an update.
    """

    index: int
    source: str
    time_s: float | None
    read_at: str | None
    probs: np.ndarray
    adapted: bool
    labels: Sequence[str] | None = field(default=None, repr=False)
    frame: DecodedFrame | None = field(default=None, repr=False)

    @property
    def class_id(self) -> int:
        """The most likely class."""
        return int(self.probs.argmax())

    @property
    def label(self) -> str | None:
        """Its name."""
        return self.labels[self.class_id] if self.labels else None

    @property
    def prob(self) -> float:
        """Its probability."""
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


def stream(source: Stream | str | Path | int | Iterable[str | Path], adapter: Adapter) -> Iterator[Result]:
    """Predict a stream's frames and learn from them; yield each frame's answer, a batch after the other.

    Frames that cannot be read are left out, with a warning. Black and repeated frames are not learned from.

    Args:
        source: A stream, or anything that `open_stream` takes; the number of a camera.
        adapter: What predicts and learns, which goes on from where it was.

    Raises:
        UsageError: If there is no such source.
        StreamError: If it fails.
    """
    adapter.warn_of_guess()
    opened = source if isinstance(source, Stream) else open_stream(str(source) if isinstance(source, int) else source)
    batches, told = Batches(opened, adapter.options, adapter.card.preprocessing), _FrameResults(adapter)
    session = Session(
        adapter,
        adapter.card,
        Counts(),
        policy=FitFrames(TimeBudget()),
        listener=told,
        interrupts=Interrupts(),
        episodic=adapter.config.episodic,
    )
    decoded = batches.decoded(opened.frames, first=0, wait=lambda: None)
    with contextlib.closing(opened), contextlib.closing(decoded):
        for frames in batches.of(decoded):
            session.run([Batch(frames)])
            yield from told.results


class _FrameResults:
    """Listens to a session: the answers to its last batch."""

    def __init__(self, adapter: Adapter) -> None:
        self._labels = adapter.card.labels
        self.results: list[Result] = []

    def answered(self, result: BatchResult) -> None:
        """Warn of frames that cannot be read."""
        for frame in result.batch.frames:
            if frame.error:
                _log.warning("left out frame %d, %s: %s", frame.index, frame.source, frame.error)

    def finished(self, result: BatchResult) -> None:
        """Take the answers."""
        logits = torch.empty(0) if result.logits is None else result.logits
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
            for frame, probs in zip(result.batch.readable, logits.float().softmax(-1).numpy(), strict=True)
        ]

    def deliver(self, result: BatchResult) -> None:
        """The stream hands them out."""


def _picture(image: Image.Image | np.ndarray) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(
            f"an array of a picture is uint8 of shape (H, W, 3) in RGB, got {image.dtype} of {image.shape}"
        )
    return Image.fromarray(image)
