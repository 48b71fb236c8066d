"""A trial: one method over all visits, with one seed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from remtta.deltas.delta import save_delta
from remtta.errors import StreamError, counted
from remtta.files import writing
from remtta.interrupts import Interrupts, Stopped
from remtta.lab.evaluation.context import EvaluationContext
from remtta.lab.evaluation.domains import Dataset, title_of
from remtta.lab.evaluation.orders import NEXT_CLASSES, NUM_CLASSES
from remtta.lab.evaluation.scenarios import TimeConstrainedPolicy, Visit, plan_visits
from remtta.lab.evaluation.time_left import TimeLeft
from remtta.lab.evaluation.trial_writer import PROGRESS, TrialRecord, TrialWriter, delta_path
from remtta.lab.heads import whole_tensors
from remtta.methods.losses import entropy
from remtta.models.peak_memory import peak_bytes, start_peak
from remtta.options import RunOptions
from remtta.pipeline.few_classes import VIEW_EVERY
from remtta.pipeline.pipeline import Pipeline
from remtta.runs.folder import PREDICTIONS
from remtta.runs.loop import AdaptationLoop, BatchResult, LearningPolicy, LoopCallback
from remtta.runs.reading import Row, read_rows
from remtta.runs.record import delta_of, guard_record
from remtta.runs.rows import RowFormat, prediction_rows
from remtta.streams.batches import Batch, Batches
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame

_Outcomes = dict[str, Counter[bool]]
"""Counts of right and wrong predictions by domain and severity."""

ShowProgress = Callable[[int, int, str, float], None]
"""Shows the number of images done, their total, the domain, and the rate per second."""

Progress = Callable[[str], contextlib.AbstractContextManager[ShowProgress]]
"""Begins to show the progress of a trial with this title."""

_TIMED_BATCHES = 2  # after the first one, which takes longer
_CHANCE = 5  # so many images may be right by chance

_log = logging.getLogger("remtta")


@contextlib.contextmanager
def no_progress(title: str) -> Iterator[ShowProgress]:
    """Show nothing."""
    yield lambda done, total, domain, rate: None


class Trial(LoopCallback):
    """Runs the loop over all visits and records its results."""

    def __init__(
        self,
        context: EvaluationContext,
        name: str,
        seed: int,
        pipeline: Pipeline,
        writer: TrialWriter,
        interrupts: Interrupts,
    ) -> None:
        self._context, self._pipeline, self._writer, self._interrupts = context, pipeline, writer, interrupts
        self._name, self._seed = name, seed
        self._visits = plan_visits(context.dataset, context.options, seed)
        self._form = RowFormat(context.info.labels, context.numbers, exact=True)
        self._outcomes: _Outcomes = {}
        self._times: list[tuple[float, int, float]] = []  # after the first batches, with images and the method's time
        reading = RunOptions(batch_size=context.batch_size(name), on_error=context.options.on_error)
        self._stream_batches = Batches(None, reading, context.info.preprocessing)
        self._position, options = writer.progress.position, context.options
        hurries = options.scenario == "time-constrained"
        self._loop = AdaptationLoop(
            pipeline,
            context.info,
            self._position,
            policy=TimeConstrainedPolicy(pipeline, self._position, options.cost_ratio) if hurries else LearningPolicy(),
            callback=self,
            interrupts=interrupts,
            reset_every=options.reset_every,
        )

    @property
    def _visit(self) -> Visit:
        return self._visits[self._position.visit]

    def run(self, state: Mapping[str, Tensor], show: ShowProgress) -> TrialRecord:
        """Go through the visits, resuming an earlier evaluation if `state` is not empty; return the trial's record.

        Raise StreamError if an image cannot be read and `on_error` is "stop", or no image of a domain can be read;
        OutputError if results cannot be written; Stopped if a signal arrived; the progress is saved.
        """
        context, position = self._context, self._position
        if state:
            self._loop.resume_from(self._writer.folder / PROGRESS, state)
        elif context.start:
            self._pipeline.load_delta(context.start.tensors, context.start.updates, context.start.frames)
            position.frames_in_delta = context.start.frames
        start_peak(context.info.device)
        self._announce()
        self._show, self._began = show, (time.perf_counter(), position.frames)
        decoded = self._stream_batches.decoded(self._unseen(), first=position.frames, wait=self._interrupts.check)
        with contextlib.closing(decoded) as frames:
            try:
                while position.visit < len(self._visits):
                    self._run_visit(frames)
            except Stopped:
                self._save()
                _log.info("progress is saved: the same command with --resume continues")
                raise
        self._save_delta()
        return self._record()

    def _announce(self) -> None:
        """Log which run of how many this is, and what its seed decides."""
        context, progress = self._context, self._writer.progress
        variants = [context.variants[name] for name in context.methods]
        number, left = len(progress.finished), len(progress.remaining(variants, context.options))
        kind = context.options.order
        order = "images shuffled by" if kind == "shuffled" else f"images in {kind} order{self._classes()},"
        _log.info("run %d of %d: %s, %s seed %d", number + 1, number + left, self._name, order, self._seed)

    def _classes(self) -> str:
        """Return, in brackets, the classes of a stream of few, and how many images it has if they come again."""
        items, labels = self._visits[0].items, self._context.info.labels
        if self._context.options.order not in NUM_CLASSES:
            return ""
        classes = np.unique(self._context.dataset.domains[items[0, 0]].labels[items[:, 1]])
        names = [labels[number] if labels else f"class {number}" for number in classes]
        listed = [] if self._context.options.order in NEXT_CLASSES else [", ".join(names)]
        if (distinct := len(np.unique(items, axis=0))) < len(items):
            listed.append(f"in the first domain {counted(distinct, 'image')}, again and again")
        return f" ({'; '.join(listed)})" if listed else ""

    def on_prediction(self, result: BatchResult) -> None:
        """Write the rows of a batch, and the guard's decisions."""
        position = self._position
        views = self._pipeline.method.last_views if result.prediction.learned.any() else None
        rows = evaluation_rows(result, self._context.dataset, self._items(result.batch.frames), self._form, views)
        fields = {"method": self._name, "seed": self._seed, "phase": self._visit.phase, "visit": position.visit}
        events = ({**fields, "index": position.frames, **event} for event in self._pipeline.events())
        self._writer.write(({**fields, **row} for row in rows), events)
        self._count(rows)
        is_first = position.visit == position.start == len(self._writer.progress.finished) == 0
        if is_first and (other_order := self._context.dataset.other_order):
            _compare_orders(rows, other_order)

    def on_batch_end(self, result: BatchResult) -> None:
        """Advance the position, and save if it is time."""
        position = self._position
        position.start += len(result.batch.frames)
        position.adapted += result.num_learned
        position.seconds += result.prediction_seconds
        domain = self._context.dataset.domains[self._visit.items[position.start - 1, 0]].title
        total, (began, first) = sum(len(visit.items) for visit in self._visits), self._began
        self._show(position.frames, total, domain, (position.frames - first) / (time.perf_counter() - began))
        if len(self._times) <= _TIMED_BATCHES:
            self._estimate()
        if self._writer.save_is_due:
            self._save()

    def _estimate(self) -> None:
        """Log how long the evaluation takes, as soon as the first batches show it."""
        position = self._position
        self._times.append((time.perf_counter(), position.frames, position.seconds))
        if len(self._times) > _TIMED_BATCHES and self._visit.phase == "adapt":
            first, *_, last = self._times
            seconds, images, in_method = (after - before for before, after in zip(first, last, strict=True))
            left = TimeLeft(self._context).after_batches(self._writer.progress, seconds / images, in_method / images)
            _log.info("%s, seed %d: %.1f images/s; %s", self._name, self._seed, images / seconds, left)

    def _run_visit(self, frames: Iterator[DecodedFrame]) -> None:
        position, visit = self._position, self._visit
        self._outcomes = {}
        if position.start:
            wanted = self._name, self._seed, position.visit
            rows = read_rows(self._writer.folder / PREDICTIONS)
            self._count(row for row in rows if (row["method"], row["seed"], row["visit"]) == wanted)
        elif visit.reset:
            self._loop.start_new_stream()
        self._loop.run(self._batches(itertools.islice(frames, len(visit.items) - position.start)))
        _refuse_unread(visit, self._context.dataset, self._outcomes)
        phase = "" if visit.phase == "adapt" else f" {visit.phase}"
        for title, outcomes in self._outcomes.items():  # one line per domain, as is customary
            _log.info("error %% [%s%s]: %.2f%%", title, phase, 100 * outcomes[False] / outcomes.total())
        position.visit, position.start = position.visit + 1, 0
        self._save()

    def _unseen(self) -> Iterator[Frame]:
        begun, start = self._position.visit, self._position.start
        for number, visit in enumerate(self._visits[begun:], begun):
            for domain, place in visit.items[start if number == begun else 0 :].tolist():
                where = self._context.dataset.domains[domain]
                yield Frame(where.sources[place], partial(where.load, place))

    def _items(self, frames: Sequence[DecodedFrame]) -> list[tuple[int, int]]:
        """Return domain and position of the next frames."""
        start = self._position.start
        return self._visit.items[start : start + len(frames)].tolist()

    def _batches(self, frames: Iterable[DecodedFrame]) -> Iterator[Batch]:
        context = self._context
        positions = {int(number): position for position, number in enumerate(context.numbers)}
        for batch in self._stream_batches.batched(frames):
            broken = next((frame for frame in batch.frames if frame.error), None)
            if broken and context.options.on_error == "stop":
                raise StreamError(f"{broken.source}: {broken.error} (--resume --on-error skip leaves such images out)")
            known = [
                positions[int(context.dataset.domains[domain].labels[place])]
                for (domain, place), frame in zip(self._items(batch.frames), batch.frames, strict=True)
                if frame.image is not None
            ]
            yield replace(batch, labels=torch.tensor(known, dtype=torch.int64), learn=self._visit.phase == "adapt")

    def _count(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if "error" in row:
                _log.warning("skipped %s: %s", row["source"], row["error"])
            else:
                title = title_of(row["domain"], row.get("severity"))
                self._outcomes.setdefault(title, Counter())[row["class"] == row["label_true"]] += 1

    def _save(self) -> None:
        self._position.peak_bytes = max(self._position.peak_bytes, peak_bytes(self._context.info.device))
        self._writer.save(self._loop.snapshot)

    def _save_delta(self) -> None:
        context, method, name = self._context, self._pipeline.method, self._name
        committed = self._pipeline.committed
        if not committed.delta or not method.norms_only:  # a delta of all weights is as large as the model
            return
        path = delta_path(self._writer.folder, name, self._seed)
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        whole = whole_tensors(committed.delta, context.model, context.numbers, context.num_classes)
        config, size = context.methods[name], context.batch_size(name)
        save_delta(path, delta_of(context.info, name, config, size, committed._replace(delta=whole)))

    def _record(self) -> TrialRecord:
        position, method = self._position, self._pipeline.method
        num_images = position.frames - position.skipped
        forwards, backwards = method.passes()
        share = position.adapted / max(1, num_images)  # the other images go forward once
        looked = self._pipeline.num_source_predictions / max(1, num_images)
        if method.trained and not position.adapted:
            _log.warning("%s, seed %d, made no update", self._name, self._seed)
        return TrialRecord(
            method=self._name,
            seed=self._seed,
            config=self._context.methods[self._name].used(),
            images=num_images,
            skipped=position.skipped,
            adapted_images=position.adapted,
            updates=position.updates,
            cost_ratio=position.cost_ratio,
            forwards_per_image=1 + share * (forwards - 1) + looked + self._pipeline.centering.active / VIEW_EVERY,
            backwards_per_image=share * backwards,
            models_held=method.num_models,
            guard=guard_record(self._pipeline, position),
            trainable_parameters=method.num_trained,
            adapted=list(method.model.weights.parameters),
            timing={"seconds": position.seconds, "peak_memory_bytes": position.peak_bytes},
        )


def _compare_orders(rows: Sequence[Row], other_order: Sequence[int]) -> None:
    """Warn if far more predictions are right with the class folders in the other order."""
    pairs = [(row["class"], row["label_true"]) for row in rows if "error" not in row]
    right = sum(predicted == true for predicted, true in pairs)
    in_other = sum(predicted == other_order[true] for predicted, true in pairs)
    if in_other > 2 * right + _CHANCE:
        _log.warning(
            "of the first %d images, %d are right with the classes in this order, %d in the other: see --class-order",
            *(len(pairs), right, in_other),
        )


def _refuse_unread(visit: Visit, dataset: Dataset, outcomes: _Outcomes) -> None:
    for number, count in zip(*np.unique(visit.items[:, 0], return_counts=True), strict=True):
        if (title := dataset.domains[number].title) not in outcomes:
            raise StreamError(
                f"{title}: no readable image ({count} failed; see {PREDICTIONS}); repair them, or "
                "leave the domain out with --domains"
            )


def evaluation_rows(
    result: BatchResult, dataset: Dataset, items: Sequence[tuple[int, int]], form: RowFormat, views: Tensor | None
) -> list[Row]:
    """Return the rows of a batch: those of `adapt` plus domain and labels, including unreadable images.

    Args:
        items: Domain index and position in the domain of each image.
        views: Logits (L, K, C) of the readable images' views, the plain one first, if there are several.
    """
    rows = prediction_rows(result, form)
    likelier = iter(_likelier(result))
    measured = iter([] if views is None else _view_rows(views))
    for row, (number, place) in zip(rows, items, strict=True):
        domain = dataset.domains[number]
        row |= {"domain": domain.name} | ({} if domain.severity is None else {"severity": domain.severity})
        if "error" not in row:
            true, above = int(domain.labels[place]), next(likelier)
            rank = 1 if row["class"] == true else 1 + above
            row |= {**next(measured, {}), "label_true": true, "rank_true": rank}
    return rows


def _likelier(result: BatchResult) -> list[int]:
    """Return for each image how many classes are likelier than the true one: at least 1 if another was predicted."""
    logits, truths = result.prediction.logits, result.batch.labels
    if not len(logits):
        return []
    assert truths is not None
    return (logits > logits.gather(1, truths[:, None])).sum(1).clamp(min=1).tolist()


def _view_rows(views: Tensor) -> list[Row]:
    """Return the total variation distance between masked and plain predictions, and each view's entropy in nats."""
    if len(views) < 2 or not torch.isfinite(views).all():
        return []
    entropies = entropy(views.float()).abs().T.tolist()
    distances = total_variation(views.float()).tolist()
    return [{"tvd": far, "entropies": nats} for far, nats in zip(distances, entropies, strict=True)]


def total_variation(logits: Tensor) -> Tensor:
    """Return the mean total variation distance (B,) between masked views' predictions and the plain one's, in [0, 1].

    Logits are (L, B, C), the plain view first; the distance is half the L1 distance.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Failure Case Analysis".
    """
    probs = logits.softmax(-1)
    return 0.5 * (probs[1:] - probs[0]).abs().sum(-1).mean(0)
