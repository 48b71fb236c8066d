"""One method over all visits, with one seed."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remtta.deltas.delta import save_delta
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import StreamError
from remtta.evaluation.hurry import Hurry
from remtta.evaluation.ledger import PROGRESS, Ledger
from remtta.evaluation.metrics import Tally
from remtta.evaluation.plan import EvalPlan, settings_of
from remtta.evaluation.progress import Position
from remtta.evaluation.results import delta_path
from remtta.evaluation.rows import evaluation_rows
from remtta.evaluation.scenarios import Visit
from remtta.files import writing
from remtta.guard.adapter import Adapter
from remtta.models.peak_memory import peak_bytes, start_peak
from remtta.runs.batch import Batch, BatchResult
from remtta.runs.folder import PREDICTIONS
from remtta.runs.policy import AllFrames
from remtta.runs.reading import read_rows
from remtta.runs.record import delta_of, guard_record, hyperparameters
from remtta.runs.rows import RowFormat
from remtta.runs.session import Moment, Session
from remtta.streams.batches import in_batches
from remtta.streams.decoding_budget import Budget
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame, prefetch

BATCHES_AHEAD = 2

_log = logging.getLogger("remtta")


class Trial:
    """Has a session go through the visits, and writes down what comes of each batch.

    Args:
        plan: The evaluation's.
        name: What it calls the method.
        seed: Of the order of images.
        adapter: The method, perhaps under the guard, at its source weights.
        ledger: Where rows go, and how far the evaluation has come.
        interrupts: Turns signals into a clean stop.
    """

    def __init__(
        self, plan: EvalPlan, name: str, seed: int, adapter: Adapter, ledger: Ledger, interrupts: Interrupts
    ) -> None:
        self._plan, self._adapter, self._ledger, self._interrupts = plan, adapter, ledger, interrupts
        self._run: dict[str, Any] = {"method": name, "seed": seed}
        self._visits = plan.visits[seed]
        self._form = RowFormat(plan.card.labels, plan.numbers, exact=True)
        self._tallies: dict[str, Tally] = {}
        position, options, method = ledger.progress.position, plan.options, adapter.method
        hurried = options.scenario == "time-constrained"
        self._session = Session(
            adapter,
            plan.card,
            position,
            policy=Hurry(method, position, options.cost_ratio) if hurried else AllFrames(),
            listener=self,
            interrupts=interrupts,
            reset_every=options.reset_every,
            episodic=plan.methods[name].episodic,
        )

    @property
    def _position(self) -> Position:
        return self._session.counts

    @property
    def _visit(self) -> Visit:
        return self._visits[self._position.visit]

    def run(self, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Go through the visits, from where an earlier evaluation stopped with this state.

        Returns:
            A record of the run.

        Raises:
            StreamError: If an image cannot be read and that is to end it, or none of a domain can.
            OutputError: If results cannot be written.
            Stopped: If a signal came in; the progress is saved.
        """
        plan, position = self._plan, self._position
        if state:
            self._session.go_on(self._ledger.folder / PROGRESS, Moment(position, state))
        elif plan.start:
            self._adapter.method.load_delta(plan.start.tensors, plan.start.updates)
            position.frames_in_delta = plan.start.frames
        start_peak(plan.card.device)
        _log.info("%s, seed %d", self._run["method"], self._run["seed"])
        with contextlib.closing(self._frames()) as frames:
            try:
                while position.visit < len(self._visits):
                    self._pay(frames)
            except Stopped:
                self._save()
                _log.info("the progress is saved: the same command with --resume goes on")
                raise
        return self._record()

    def answered(self, result: BatchResult) -> None:
        """Write a batch's rows, and what the guard decided."""
        plan, position = self._plan, self._position
        items = self._visit.items[position.start : position.start + len(result.batch.frames)].tolist()
        views = self._adapter.method.last_views if result.called else None
        rows = evaluation_rows(result, plan.dataset, items, self._form, views)
        context = {**self._run, "phase": self._visit.phase, "visit": position.visit}
        events = ({**context, "index": position.frames, **event} for event in self._adapter.events())
        self._ledger.write(({**context, **row} for row in rows), events)
        _count(rows, self._tallies)

    def finished(self, result: BatchResult) -> None:
        """Move on, and save if it is time."""
        position = self._position
        position.start += len(result.batch.frames)
        position.adapted += result.num_learned
        position.seconds += result.answer_seconds
        if self._ledger.save_is_due:
            self._save()

    def pass_on(self, result: BatchResult) -> None:
        """There is nobody to hand rows to."""

    def _pay(self, frames: Iterator[DecodedFrame]) -> None:
        """The visit of the moment, or what is left of it."""
        position, visit = self._position, self._visit
        self._tallies = self._earlier_tallies() if position.start else {}
        if visit.reset and position.start == 0:
            self._session.reset()
        self._session.run(self._batches(visit, itertools.islice(frames, len(visit.items) - position.start)))
        self._refuse_unread(visit)
        _report(self._tallies, visit)
        position.visit, position.start = position.visit + 1, 0
        self._save()

    def _frames(self) -> Generator[DecodedFrame]:
        return prefetch(
            self._unseen(),
            self._plan.card.preprocessing.transform(),
            ahead=BATCHES_AHEAD * self._plan.options.batch_size,
            first=self._position.frames,
            memory=Budget(afterwards=self._plan.card.preprocessing.resized_bytes),
            wait=self._interrupts.check,
        )

    def _unseen(self) -> Iterator[Frame]:
        begun, start = self._position.visit, self._position.start
        for number, visit in enumerate(self._visits[begun:], begun):
            for domain, place in visit.items[start if number == begun else 0 :].tolist():
                where = self._plan.dataset.domains[domain]
                yield Frame(where.sources[place], partial(where.load, place))

    def _batches(self, visit: Visit, frames: Iterable[DecodedFrame]) -> Iterator[Batch]:
        plan = self._plan
        positions = {int(number): position for position, number in enumerate(plan.numbers)}
        stops = plan.options.on_error == "stop"
        for batch in in_batches(frames, plan.options.batch_size, stop_at_errors=stops):
            broken = next((frame for frame in batch if frame.error), None)
            if broken and stops:
                raise StreamError(f"{broken.source}: {broken.error} (--resume --on-error skip leaves such images out)")
            items = visit.items[self._position.start : self._position.start + len(batch)].tolist()
            known = [
                positions[int(plan.dataset.domains[domain].labels[place])]
                for (domain, place), frame in zip(items, batch, strict=True)
                if frame.image is not None
            ]
            yield Batch(batch, torch.tensor(known, dtype=torch.int64), learn=visit.adapt)

    def _refuse_unread(self, visit: Visit) -> None:
        for number, count in zip(*np.unique(visit.items[:, 0], return_counts=True), strict=True):
            title = self._plan.dataset.domains[number].title
            if title not in self._tallies:
                raise StreamError(
                    f"{title}: none of its {count} image(s) could be read (see {PREDICTIONS}); mend them, or leave the "
                    "domain out by --domains"
                )

    def _earlier_tallies(self) -> dict[str, Tally]:
        """Outcomes of this visit from before the evaluation was stopped."""
        wanted = {**self._run, "visit": self._position.visit}
        rows = read_rows(self._ledger.folder / PREDICTIONS)
        tallies: dict[str, Tally] = {}
        _count((row for row in rows if wanted.items() <= row.items()), tallies)
        return tallies

    def _save(self) -> None:
        self._position.peak_bytes = max(self._position.peak_bytes, peak_bytes(self._plan.card.device))
        self._ledger.save(self._session.moment)

    def _record(self) -> dict[str, Any]:
        """The run in numbers; its delta, of a method that changes only norms, is saved."""
        plan, position, method, guard = self._plan, self._position, self._adapter.method, self._adapter.guard
        name, seed = self._run["method"], self._run["seed"]
        config = plan.methods[name]
        if method.committed[0] and method.norms_only:  # one of every weight is as large as the model
            path = delta_path(self._ledger.folder, name, seed)
            with writing(path):
                path.parent.mkdir(exist_ok=True)
            settings = hyperparameters(config, plan.options.batch_size)
            conditions = {"made_by": "eval", "source": str(plan.dataset.root), "kind": plan.dataset.layout}
            save_delta(
                path,
                delta_of(
                    plan.card, name, settings, method.committed, position, start=plan.start, conditions=conditions
                ),
            )
        num_images = position.frames - position.skipped
        forwards, backwards = method.objective.passes()
        looked = guard.num_looked / max(1, num_images) if guard else 0.0
        return {
            **self._run,
            "config": settings_of(config),
            "images": num_images,
            "skipped": position.skipped,
            "adapted_images": position.adapted,
            "updates": position.updates,
            "cost_ratio": position.cost_ratio,
            "forwards_per_image": forwards + looked,
            "backwards_per_image": backwards,
            "models_held": method.objective.num_models,
            "guard": guard_record(self._adapter, position),
            "trainable_parameters": method.objective.num_trained,
            "adapted": list(method.adapted_names),
            "timing": {"seconds": position.seconds, "peak_memory_bytes": position.peak_bytes},
        }


def _count(rows: Iterable[Mapping[str, Any]], tallies: dict[str, Tally]) -> None:
    for row in rows:
        if "error" in row:
            _log.warning("left out %s: %s", row["source"], row["error"])
        else:
            title = f"{row['domain']}{row.get('severity', '')}"
            tallies.setdefault(title, Tally()).add(row)


def _report(tallies: Mapping[str, Tally], visit: Visit) -> None:
    """The field's line per domain."""
    phase = "" if visit.phase == "adapt" else f" {visit.phase}"
    for title, tally in tallies.items():
        _log.info("error %% [%s%s]: %.2f%%", title, phase, tally.error)
