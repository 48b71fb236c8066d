"""Run methods over labelled domains; every number comes from the rows this writes."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remtta.bench.memory import peak_bytes, start_peak
from remtta.deltas.delta import Delta, check_base, save_delta
from remtta.errors import RemttaError, StreamError, UsageError
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.metrics import Tally
from remtta.evaluation.progress import Position, Progress, load_progress, save_progress
from remtta.evaluation.results import DELTAS, PLOTS, delta_path, markdown_table, summarise, tally_rows
from remtta.evaluation.scenarios import Visit, plan_visits
from remtta.files import FolderLock, remove_leftovers, write_atomically, write_json, writing
from remtta.guard.guard import Guard, guarded
from remtta.methods.losses import entropy, total_variation
from remtta.methods.method import Method
from remtta.methods.registry import build_method
from remtta.methods.settings import METHOD_CONFIGS, MethodConfig, method_config
from remtta.methods.settings.names import check_method_names, is_guarded, method_of
from remtta.methods.source_data import check_source_data, learn_from_source
from remtta.models.classes import restricted_classes
from remtta.models.config import origin_of
from remtta.models.hashing import state_sha256
from remtta.models.labels import labels_of, set_labels
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.options import EvalOptions
from remtta.runs.environment import environment
from remtta.runs.folder import EVENTS, PREDICTIONS, check_same_settings
from remtta.runs.interrupts import Interrupts, Stopped
from remtta.runs.journal import PredictionWriter
from remtta.runs.place import read_record
from remtta.runs.rows import read_rows
from remtta.runs.states import take_back
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame, prefetch

RESULTS = "results.json"
TABLE = "table.md"
PROGRESS = ".progress.safetensors"
BATCHES_AHEAD = 2
SAVING_SHARE = 20  # a state of gigabytes is saved so seldom that it costs 1 / 20 of the time

_TIMED_BATCHES = 3  # behind each side of a measured cost ratio

_log = logging.getLogger("remtta")


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    output: str | Path,
    *,
    methods: Mapping[str, MethodConfig | None] | Sequence[str],
    options: EvalOptions | None = None,
    preprocessing: Preprocessing | None = None,
    delta: Delta | None = None,
    source_data: str | Path | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, Any]:
    """Run methods over labelled domains and measure them.

    Writes `predictions.jsonl` (a row per image, method and seed), `results.json`, `table.md`,
    a delta per seed and method that changes only norms, and, where a method is under the
    guard, its decisions to `events.jsonl` into the output folder.

    Args:
        model: A timm classifier, as from `load_model`; back at its source weights afterwards, however
            this ends. Where the data set says what its classes are called, it keeps their names.
        dataset: The domains, from `open_dataset`.
        output: Folder for the results.
        methods: Names in the order of the table, each METHOD, METHOD+guard, or LABEL=METHOD for one
            more row of a method with other settings; with their settings, or None for the published ones.
        options: Scenario, batch size, seeds and the like.
        preprocessing: How images become inputs; by default as the model asks for.
        delta: Start every run from these adapted weights, that of `source` too; a reset still goes to the source.
        source_data: Clean source images (a folder), or the statistics of some (a file), for
            methods that learn from them first.
        interrupts: Turns signals into a clean stop.

    Returns:
        What `results.json` holds.

    Raises:
        UsageError: If the folder holds another evaluation, the options do not fit the data, or a
            method lacks its source images.
        DeltaError: If the delta does not fit the model.
        StreamError: If an image cannot be read and `on_error` is "stop", or none of a domain can.
        OutputError: If results cannot be written.
        Stopped: If a signal came in; the progress is saved for `resume`.
    """
    options = options or EvalOptions()
    methods = _checked_methods(methods, options.batch_size)
    check_source_data(map(method_of, methods), source_data)
    base_sha256 = state_sha256(model)
    if delta is not None:
        check_base(delta, base_sha256)
        if options.scenario == "episodic":
            raise UsageError("the episodic scenario begins every domain at the source weights; leave --delta out")
    if dataset.names and labels_of(model) is None:
        set_labels(model, dataset.names)
    numbers = dataset.class_numbers if dataset.restricted_to else None
    with restricted_classes(model, numbers):
        run = _Evaluation(model, dataset, Path(output), methods, options, preprocessing, delta, base_sha256, numbers)
        return run.execute(source_data, interrupts or Interrupts())


class _Evaluation:
    """All runs of one evaluation and the files they leave."""

    def __init__(
        self,
        model: nn.Module,
        dataset: Dataset,
        folder: Path,
        methods: Mapping[str, MethodConfig],
        options: EvalOptions,
        preprocessing: Preprocessing | None,
        start: Delta | None,
        base_sha256: str,
        numbers: Sequence[int] | None,
    ) -> None:
        self.model, self.dataset, self.folder = model, dataset, folder
        self.origin = origin_of(model)
        self.methods, self.options = methods, options
        self.preprocessing = preprocessing or preprocessing_of(model)
        self.start, self.base_sha256 = start, base_sha256
        self.device = next(model.parameters()).device
        self.labels = labels_of(model)
        num_classes = int(model.num_classes)  # type: ignore[arg-type]
        self.numbers = np.arange(num_classes) if numbers is None else np.array(numbers)
        self.positions = {int(number): position for position, number in enumerate(self.numbers)}
        self.plans = {seed: plan_visits(dataset, options, seed) for seed in options.seeds}
        self.saved_at = time.monotonic()
        self.saving_seconds = 0.0
        self.guard: Guard | None = None
        self.episodic = False
        self.events: PredictionWriter | None = None
        self.learned: dict[str, dict[str, Any]] = {}

    def execute(self, source_data: str | Path | None, interrupts: Interrupts) -> dict[str, Any]:
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.folder)
        remove_leftovers(self.folder, (RESULTS, TABLE, PROGRESS))
        remove_leftovers(self.folder / DELTAS, ("*.safetensors",))
        try:
            if source_data is not None:
                self._refuse_earlier()
                self._learn_from_source(source_data, interrupts)
            return self._execute(interrupts)
        finally:
            lock.release()

    def _execute(self, interrupts: Interrupts) -> dict[str, Any]:
        earlier = self._earlier()
        if earlier and earlier["status"] == "completed":
            _log.info("the evaluation in %s is complete", self.folder)
            return earlier
        progress, state = self._claim(going_on=earlier is not None)
        with contextlib.ExitStack() as files:
            writer = files.enter_context(PredictionWriter(self.folder / PREDICTIONS, keep_bytes=progress.num_bytes))
            if any(map(is_guarded, self.methods)):
                path = self.folder / EVENTS
                kept = progress.event_bytes if path.exists() else 0  # decisions that somebody deleted are only reported
                self.events = files.enter_context(PredictionWriter(path, keep_bytes=kept))
            runs = list(itertools.product(self.methods, self.options.seeds))
            for method, seed in runs[len(progress.finished) :]:
                torch.manual_seed(seed)
                adapter = build_method(method_of(method), self.model, self.methods[method])
                try:
                    self._one(adapter, method, seed, progress, state, writer, interrupts)
                finally:
                    adapter.reset()
                progress.position, state = Position(), {}
                self._save(progress, {}, writer)
        results = self._results("completed", progress.finished)
        with writing(self.folder / PROGRESS):
            (self.folder / PROGRESS).unlink(missing_ok=True)
        return results

    def _one(
        self,
        adapter: Method,
        method: str,
        seed: int,
        progress: Progress,
        state: Mapping[str, Tensor],
        writer: PredictionWriter,
        interrupts: Interrupts,
    ) -> None:
        """A method's run with a seed, from where it stopped with this state."""
        adapter.reset()
        self.guard, self.episodic = self._guard(method, adapter), self.methods[method].episodic
        if method in self.learned:
            self._learn(adapter, method, self.learned[method]["path"])
        if state:
            take_back(self.folder / PROGRESS, state, *([self.guard] if self.guard else []), adapter)
        elif self.start:
            adapter.load_delta(self.start.tensors, self.start.updates)
            progress.position.frames_in_delta = self.start.frames
        with contextlib.closing(self._frames(seed, progress.position, interrupts)) as frames:
            self._run(adapter, method, seed, frames, progress, writer, interrupts)
        progress.finished.append(self._finish_run(adapter, method, seed, progress.position))

    def _guard(self, method: str, adapter: Method) -> Guard | None:
        if not is_guarded(method):
            return None
        guard = guarded(adapter, self.options.guard, self.methods[method])
        if guard is None:
            raise UsageError(f"{method_of(method)} changes no weights that a guard could put back; leave +guard out")
        return guard

    def _state(self, adapter: Method) -> dict[str, Tensor]:
        return {**adapter.state(), **(self.guard.state() if self.guard else {})}

    def _learn_from_source(self, source_data: str | Path, interrupts: Interrupts) -> None:
        """Have the statistics of every method that needs some on the disk, before anything is recorded."""
        for method, config in self.methods.items():
            adapter = build_method(method_of(method), self.model, config)
            if adapter.needs_source:
                self.learned[method] = self._learn(adapter, method, source_data, interrupts.check)

    def _learn(
        self, adapter: Method, method: str, source_data: str | Path, wait: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        chosen, crop_pct = self.preprocessing, preprocessing_of(self.model).crop_pct
        # Domains of the input size are taken as they are, which does not say how to crop photographs.
        as_they_are = chosen.crop_pct == 1 and set(self.dataset.sizes) == {chosen.input_size[::-1]}
        return learn_from_source(
            adapter,
            self.model,
            source_data,
            method=method_of(method),
            config=self.methods[method],
            preprocessing=replace(chosen, crop_pct=crop_pct) if as_they_are else chosen,
            fitting_as_they_are=as_they_are and crop_pct != 1,
            wait=wait,
        )

    def _refuse_earlier(self) -> None:
        earlier = [name for name in (RESULTS, PREDICTIONS) if (self.folder / name).exists()]
        if earlier == [PREDICTIONS] and self.options.resume:
            raise UsageError(f"{self.folder} has lost its {RESULTS}, so it cannot go on; --overwrite replaces it")
        if earlier and not (self.options.overwrite or self.options.resume):
            raise UsageError(
                f"{self.folder} holds an earlier evaluation; go on with it by --resume, replace it by --overwrite, "
                "or choose another --output"
            )

    def _remove_earlier(self) -> None:
        """Remove what an earlier evaluation left that this one may not write itself; a folder of others stays."""
        if not (self.folder / RESULTS).exists():
            return
        for pattern in (TABLE, EVENTS, f"{DELTAS}/*.safetensors", f"{PLOTS}/*.png"):
            for path in self.folder.glob(pattern):
                path.unlink()
        for name in (DELTAS, PLOTS):
            with contextlib.suppress(OSError):  # absent, or it holds something else
                (self.folder / name).rmdir()

    def _claim(self, *, going_on: bool) -> tuple[Progress, dict[str, Tensor]]:
        """Make the folder ready, or find out how far the evaluation in it has come."""
        if going_on:
            progress, state = load_progress(self.folder / PROGRESS)
            if progress.finished or progress.position.index:
                _log.info("going on after %d run(s) and %d images", len(progress.finished), progress.position.index)
            return progress, state
        self._refuse_earlier()
        with writing(self.folder):
            (self.folder / PROGRESS).unlink(missing_ok=True)
            self._remove_earlier()
        write_json(self.folder / RESULTS, {"status": "running", "settings": self._settings()})
        return Progress(), {}

    def _earlier(self) -> dict[str, Any] | None:
        """The results, so far, of the evaluation to go on with; None where there is or is meant to be none."""
        record = self.folder / RESULTS
        if not self.options.resume or not record.exists():
            return None
        earlier = read_record(record)
        if not {"settings", "status"} <= earlier.keys():
            raise UsageError(f"{record} is damaged (it is no record of an evaluation); start again with --overwrite")
        check_same_settings(earlier["settings"], json.loads(json.dumps(self._settings())))
        return earlier

    def _frames(self, seed: int, position: Position, interrupts: Interrupts) -> Generator[DecodedFrame]:
        return prefetch(
            self._waiting(self.plans[seed], position),
            self.preprocessing.transform(),
            ahead=BATCHES_AHEAD * self.options.batch_size,
            wait=interrupts.check,
        )

    def _waiting(self, visits: Sequence[Visit], position: Position) -> Iterator[Frame]:
        for number, visit in enumerate(visits):
            if number >= position.visit:
                start = position.start if number == position.visit else 0
                for domain, place in visit.items[start:].tolist():
                    where = self.dataset.domains[domain]
                    yield Frame(where.sources[place], partial(where.load, place))

    def _run(
        self,
        adapter: Method,
        method: str,
        seed: int,
        frames: Iterator[DecodedFrame],
        progress: Progress,
        writer: PredictionWriter,
        interrupts: Interrupts,
    ) -> None:
        position = progress.position
        start_peak(self.device)
        _log.info("%s, seed %d", method, seed)
        visits = self.plans[seed]
        for number in range(position.visit, len(visits)):
            visit = visits[number]
            tallies = self._earlier_rows(method, seed, number) if position.start else {}
            if visit.reset and position.start == 0:
                self._reset(adapter, position)
            while position.start < len(visit.items):
                size = min(self.options.batch_size, len(visit.items) - position.start)
                try:
                    batch = list(itertools.islice(frames, size))
                    with interrupts.held():
                        rows = self._process(adapter, visit, batch, position)
                        context = {"method": method, "seed": seed, "phase": visit.phase, "visit": number}
                        writer.write({**context, **row} for row in rows)
                        if self.guard and self.events:
                            events = self.guard.events()
                            self.events.write({**context, "index": position.index, **event} for event in events)
                        _count(rows, tallies)
                        position.start += len(batch)
                        position.index += len(batch)
                        pause = max(self.options.save_every_s, SAVING_SHARE * self.saving_seconds)
                        if time.monotonic() - self.saved_at > pause:
                            self._save(progress, self._state(adapter), writer)
                except Stopped:
                    self._save(progress, self._state(adapter), writer)
                    _log.info("the progress is saved: the same command with --resume goes on")
                    raise
            self._refuse_unread(tallies, visit)
            _report(tallies, visit)
            position.visit, position.start = number + 1, 0
            self._save(progress, self._state(adapter), writer)

    def _refuse_unread(self, tallies: Mapping[str, Tally], visit: Visit) -> None:
        for number, count in zip(*np.unique(visit.items[:, 0], return_counts=True), strict=True):
            title = self.dataset.domains[number].title
            if title not in tallies:
                raise StreamError(
                    f"{title}: none of its {count} image(s) could be read (see {PREDICTIONS}); mend them, or leave the "
                    "domain out by --domains"
                )

    def _reset(self, adapter: Method, position: Position) -> None:
        adapter.reset()
        if self.guard:
            self.guard.reset()
        position.frames_in_delta = position.frames_since_reset = 0

    def _reset_is_due(self, position: Position) -> bool:
        every = self.options.reset_every
        return every is not None and position.frames_since_reset >= every

    def _process(
        self, adapter: Method, visit: Visit, batch: Sequence[DecodedFrame], position: Position
    ) -> list[dict[str, Any]]:
        readable = [frame for frame in batch if frame.image is not None]
        broken = next((frame for frame in batch if frame.error), None)
        if broken and self.options.on_error == "stop":
            raise StreamError(f"{broken.source}: {broken.error} (--resume --on-error skip leaves such images out)")
        items = visit.items[position.start : position.start + len(batch)].tolist()
        truth = [int(self.dataset.domains[domain].labels[place]) for domain, place in items]
        predicted: Iterator[dict[str, Any]] = iter(())
        if readable:
            images = torch.stack([frame.image for frame in readable if frame.image is not None])
            known = [
                self.positions[label] for label, frame in zip(truth, batch, strict=True) if frame.image is not None
            ]
            predicted = iter(self._predict(adapter, visit, images, torch.tensor(known), position))
        position.skipped += len(batch) - len(readable)
        rows = []
        for offset, (frame, (domain, _), label) in enumerate(zip(batch, items, truth, strict=True)):
            where = self.dataset.domains[domain]
            row = {"index": position.index + offset, "source": frame.source, "domain": where.name}
            row |= {} if where.severity is None else {"severity": where.severity}
            row |= {"error": frame.error} if frame.error else {**next(predicted), "label_true": label}
            rows.append(row)
        return rows

    def _predict(
        self, adapter: Method, visit: Visit, images: Tensor, labels: Tensor, position: Position
    ) -> list[dict[str, Any]]:
        pixels = self.preprocessing.normalise(images.to(self.device, non_blocking=True))
        labels = labels.to(self.device)
        learn = adapter.adapts and visit.adapt
        if learn and self.options.scenario == "time-constrained":
            learn = self._in_time(adapter, pixels, labels, position)
        if self.episodic or (visit.adapt and self._reset_is_due(position)):
            self._reset(adapter, position)
        update = adapter.num_updates  # since the last reset
        steps = learn and not (self.guard and self.guard.retired)  # else the method is not called
        started = time.perf_counter()
        step = self.guard or adapter
        known = labels if adapter.needs_labels else None
        logits = (step(pixels, known) if learn else step.predict(pixels)).cpu()
        position.seconds += time.perf_counter() - started
        if not torch.isfinite(logits).all():
            raise RemttaError(
                "the model's outputs are no longer finite numbers; use a lower --lr, or check the checkpoint"
            )
        after = adapter.num_updates
        adapted = after > update or 0 < after < update  # some methods go back to the source by themselves
        if after < update:
            position.frames_in_delta = position.frames_since_reset = 0
        if adapted:
            position.adapted += len(images)
            position.frames_in_delta += len(images)
            position.frames_since_reset += len(images)
        position.updates += after - update if after >= update else 1  # the step that was undone
        by_source = self.guard is not None and self.guard.from_source
        position.by_source += by_source * len(images)
        rows = self._rows(logits)
        for row in rows:
            row |= {"update": 0 if by_source else update, "adapted": adapted}
            row |= {"answered_by": "source"} if by_source else {}
        views = adapter.last_views if steps else None
        if views is not None and len(views) > 1 and torch.isfinite(views).all():
            for row, distance, nats in zip(rows, *_view_metrics(views), strict=True):
                row |= {"tvd": distance, "entropies": nats}
        return rows

    def _rows(self, logits: Tensor) -> list[dict[str, Any]]:
        probs, guesses = logits.softmax(-1).max(-1)
        columns = zip(probs.tolist(), guesses.tolist(), entropy(logits).tolist(), strict=True)
        return [
            {
                "class": int(self.numbers[guess]),
                "label": self.labels[guess] if self.labels else None,
                "prob": float(f"{prob:.9g}"),  # 9 digits restore a float32, on which the calibration bins depend
                "entropy": float(f"{abs(nats):.9g}"),
            }
            for prob, guess, nats in columns
        ]

    def _in_time(self, adapter: Method, pixels: Tensor, labels: Tensor, position: Position) -> bool:
        """Whether the stream waits for this batch's update, in the time-constrained scenario."""
        if position.cost_ratio is None:
            position.cost_ratio = self.options.cost_ratio or _measure_cost_ratio(adapter, pixels, labels)
        if position.skip:
            position.skip -= 1
            return False
        position.skip = math.ceil(position.cost_ratio) - 1
        return True

    def _earlier_rows(self, method: str, seed: int, visit: int) -> dict[str, Tally]:
        """Outcomes of this visit from before the evaluation was stopped."""
        wanted = (method, seed, visit)
        rows = read_rows(self.folder / PREDICTIONS)
        tallies: dict[str, Tally] = {}
        _count((row for row in rows if (row["method"], row["seed"], row["visit"]) == wanted), tallies)
        return tallies

    def _save(self, progress: Progress, state: Mapping[str, Tensor], writer: PredictionWriter) -> None:
        progress.num_bytes = writer.sync()
        progress.event_bytes = self.events.sync() if self.events else 0
        progress.position.peak_bytes = max(progress.position.peak_bytes, peak_bytes(self.device))
        started = time.monotonic()
        save_progress(self.folder / PROGRESS, progress, state)
        self.saved_at = time.monotonic()
        self.saving_seconds = self.saved_at - started

    def _finish_run(self, adapter: Method, method: str, seed: int, position: Position) -> dict[str, Any]:
        delta = adapter.delta()
        if delta and adapter.norms_only:  # one of every weight is as large as the model
            path = delta_path(self.folder, method, seed)
            with writing(path):
                path.parent.mkdir(exist_ok=True)
            save_delta(
                path,
                Delta(
                    tensors=delta,
                    model=self.origin["name"],
                    base_sha256=self.base_sha256,
                    method=method,
                    hyperparameters={**asdict(self.methods[method]), "batch_size": self.options.batch_size},
                    frames=position.frames_in_delta,
                    updates=adapter.num_updates,
                    model_options={key: value for key, value in self.origin.items() if key != "name"},
                    preprocessing=self.preprocessing.as_dict(),
                ),
            )
        return {
            "method": method,
            "seed": seed,
            "config": _settings_of(self.methods[method]),
            "images": position.index - position.skipped,
            "skipped": position.skipped,
            "adapted_images": position.adapted,
            "updates": position.updates,
            "cost_ratio": position.cost_ratio,
            "forwards_per_image": adapter.num_forwards + self._looked(position),
            "backwards_per_image": adapter.num_backwards,
            "models_held": adapter.num_models,
            "guard": self._guard_record(position),
            "trainable_parameters": adapter.num_trained,
            "adapted": list(adapter.adapted_names),
            "timing": {"seconds": position.seconds, "peak_memory_bytes": position.peak_bytes},
        }

    def _looked(self, position: Position) -> float:
        """Forward passes per image that the guard took."""
        return self.guard.num_looked / max(1, position.index - position.skipped) if self.guard else 0.0

    def _guard_record(self, position: Position) -> dict[str, Any] | None:
        if self.guard is None:
            return None
        return {
            "alarms": self.guard.total_alarms,
            "retired": self.guard.retired,
            "answered_by_source": position.by_source,
        }

    def _results(self, status: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        order = list(dict.fromkeys(domain.name for domain in self.dataset.domains))
        methods = summarise(tally_rows(self.folder / PREDICTIONS), runs, order)
        made_with = environment(self.device)
        del made_with["command"]  # differs after --resume, and the settings say all it says
        content = {
            "status": status,
            "methods": methods,
            "settings": self._settings(),
            "environment": made_with,
        }
        write_json(self.folder / RESULTS, content)
        table = markdown_table(content)
        write_atomically(self.folder / TABLE, lambda temporary: temporary.write_text(table, encoding="utf-8"))
        return content

    def _settings(self) -> dict[str, Any]:
        options = {
            name: value
            for name, value in asdict(self.options).items()
            if name not in ("overwrite", "resume", "save_every_s", "on_error")
        }
        if math.isinf(self.options.imbalance):
            options["imbalance"] = "infinity"  # which JSON has no number for
        domains = [
            {
                "name": domain.name,
                "severity": domain.severity,
                "images": len(domain.sources),
                "labels_sha256": hashlib.sha256(np.ascontiguousarray(domain.labels).data).hexdigest(),
            }
            for domain in self.dataset.domains
        ]
        return {
            "data": {
                "root": str(self.dataset.root),
                "layout": self.dataset.layout,
                "classes": self.dataset.classes,
                "restricted_to": self.dataset.restricted_to,
                "domains": domains,
            },
            "model": {**self.origin, "base_sha256": self.base_sha256},
            "preprocessing": self.preprocessing.as_dict(),
            "methods": {name: _settings_of(config) for name, config in self.methods.items()},
            "options": options,
            "device": str(self.device),
            **({"start_delta": self.start.origin} if self.start else {}),
            **({"source_statistics": self.learned} if self.learned else {}),
        }


def _checked_methods(
    methods: Mapping[str, MethodConfig | None] | Sequence[str], batch_size: int
) -> dict[str, MethodConfig]:
    """Every method's settings, the published ones where none are given."""
    check_method_names(list(methods))
    given = methods if isinstance(methods, Mapping) else dict.fromkeys(methods)
    chosen = {}
    for name, config in given.items():
        kind = METHOD_CONFIGS[method_of(name)]
        chosen[name] = method_config(method_of(name), {}, batch_size=batch_size) if config is None else config
        if not {field.name for field in fields(kind)} <= vars(chosen[name]).keys():
            raise UsageError(f"{name} takes its settings as a {kind.__name__}, got a {type(config).__name__}")
    return chosen


def _settings_of(config: MethodConfig) -> dict[str, Any]:
    """Those of a method's settings that it has a use for, as JSON gives them back."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(config).items()
        if name not in config.unused
    }


def _view_metrics(views: Tensor) -> tuple[list[float], list[list[float]]]:
    """Total variation distance of masked from unmasked predictions, and entropies in nats, per image.

    Args:
        views: Logits of shape (L, B, C), the unmasked view first.

    Returns:
        Distances (B,), the mean over the masked views; entropies (B, L).
    """
    nats = entropy(views.float()).abs().T
    return total_variation(views.float()).tolist(), nats.tolist()


def _measure_cost_ratio(adapter: Method, pixels: Tensor, labels: Tensor) -> float:
    """Time of an adapting batch over that of a plain forward pass; the method is left as it was."""
    state = adapter.state()
    times: dict[str, list[float]] = {"adapt": [], "base": []}
    for _ in range(_TIMED_BATCHES):
        for name in times:
            started = time.perf_counter()
            out = (
                adapter(pixels, labels if adapter.needs_labels else None)
                if name == "adapt"
                else adapter.predict(pixels)
            )
            out.cpu()  # waits for the device
            times[name].append(time.perf_counter() - started)
    adapter.load_state(state)
    ratio = max(1.0, min(times["adapt"]) / min(times["base"]))
    _log.info("an update costs %.2f forward passes", ratio)
    return ratio


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
