"""Evaluate methods on labelled domains: one trial per method and seed, here or in workers, in one folder."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pickle
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.deltas.delta import Delta, check_base
from remtta.engines.cluster import connected, on_ray
from remtta.engines.interrupts import Interrupts, Stopped, WorkerInterrupts
from remtta.engines.processes import in_processes
from remtta.errors import RemttaError, UsageError, counted, first_line
from remtta.evaluation.class_maps import map_classes
from remtta.evaluation.context import EvaluationContext, read_earlier
from remtta.evaluation.domains import Dataset
from remtta.evaluation.results import summarise
from remtta.evaluation.scenarios import plan_visits
from remtta.evaluation.tally import errors_by_round, tally_rows
from remtta.evaluation.trial import Trial
from remtta.evaluation.trial_writer import DELTAS, PLOTS, PROGRESS, EvaluationProgress, TrialWriter, delta_path
from remtta.files import FolderLock, remove_leftovers, write_atomically, write_json, writing
from remtta.machine import num_cores
from remtta.methods.settings import MethodConfig, settings_of
from remtta.methods.settings.names import check_method_names, is_guarded, method_of
from remtta.methods.source_data import check_source_data
from remtta.models.card import card_of, labels_of, set_labels
from remtta.models.hashing import state_sha256
from remtta.models.heads import restricted_classes, restricted_tensors
from remtta.models.metadata import ModelWithMetadata
from remtta.models.preprocessing import Preprocessing
from remtta.models.unwrapping import is_timm_model
from remtta.options import EvalOptions
from remtta.runs.folder import EVENTS, PREDICTIONS, RESULTS, check_free
from remtta.runs.manifest import environment
from remtta.runs.reading import read_rows, reading
from remtta.runs.states import load_position, save_state
from remtta.runs.tables import TABLE, markdown_table

TRIALS = ".runs"  # trials run by workers, each an evaluation in a folder of its own

_Shared = tuple[bytes | None, Mapping[str, Any], int]
"""The plan, pickled with its model; source statistics of the methods; number of torch threads."""

_Task = tuple[tuple[str, int], Path]
"""A trial's method and seed, and its folder."""

_KEPT_IN = {DELTAS: "*.safetensors", PLOTS: "*.png"}

_log = logging.getLogger("remtta")


def evaluate(
    model: nn.Module,
    dataset: Dataset,
    output: str | Path,
    *,
    methods: Mapping[str, MethodConfig | Mapping[str, Any] | None] | Sequence[str],
    options: EvalOptions | None = None,
    preprocessing: Preprocessing | None = None,
    delta: Delta | None = None,
    source_data: str | Path | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, Any]:
    """Evaluate methods on labelled domains.

    Writes into the output folder `predictions.jsonl` (a row per image, method and seed), `results.json` and `table.md`;
    also a delta per seed for each method that changes only norms, and the guard's decisions as `events.jsonl` if a
    method is guarded.

    Args:
        model: A classifier; it is restored to its source weights in any case. If the dataset names the classes of a
            timm model without names, they become the model's.
        dataset: The domains, as returned by `open_dataset`.
        methods: Names in the order of the table, e.g. METHOD, METHOD+guard or LABEL=METHOD (another row of the same
            method with other settings), each mapped to the settings that differ from its defaults, to a whole config,
            or to None.
        preprocessing: How images become inputs; by default the model's own.
        delta: Start every trial from these adapted weights, including that of `source`; a reset still restores the
            source weights.
        source_data: Clean source images (a folder), or statistics computed from some (a file), for methods that need
            them.
        interrupts: Turns signals into a clean stop.

    Returns:
        The contents of `results.json`.

    Raises:
        UsageError: If the folder holds another evaluation, the options do not suit the data, or a method needs source
            images.
        DeltaError: If the delta does not fit the model.
        StreamError: If an image cannot be read and `on_error` is "stop", or no image of a domain can be read.
        OutputError: If results cannot be written.
        Stopped: If a signal arrived; the progress is saved for `resume`.
    """
    options = options or EvalOptions()
    if options.order is None:
        options = replace(options, order="shuffled" if dataset.shuffled or options.shuffles else "stored")
    if options.order == "stored" and len(options.seeds) > 1:
        _log.warning(
            "the images keep their stored order, so seeds change only random methods; --order shuffled shuffles"
        )
    check_method_names(list(methods))
    given = methods if isinstance(methods, Mapping) else dict.fromkeys(methods)
    chosen = {name: settings_of(method_of(name), each, batch_size=options.batch_size) for name, each in given.items()}
    check_source_data(map(method_of, chosen), source_data)
    base_sha256 = state_sha256(model)
    if delta is not None:
        check_base(delta, base_sha256)
        if options.scenario == "episodic":
            raise UsageError("the episodic scenario starts every domain from the source weights; leave --delta out")
    if dataset.names:
        model = _named(model, dataset.names)
    plan_visits(dataset, options, options.seeds[0])  # refuses what the data set lacks
    numbers, num_classes = dataset.class_numbers if dataset.restricted_to else None, card_of(model).num_classes
    if delta is not None and numbers is not None:
        delta = replace(delta, tensors=restricted_tensors(delta.tensors, model, numbers))
    with restricted_classes(model, numbers):
        card = card_of(model, preprocessing, base_sha256)
        outputs = range(card.num_classes) if numbers is None else numbers
        plan = EvaluationContext(model, card, dataset, chosen, options, outputs, num_classes, delta)
        return _Evaluation(plan, Path(output), interrupts or Interrupts()).execute(source_data)


def _named(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Name a model's classes by folders unless it has names; raise UsageError if folders give these another order."""
    if (own := labels_of(model)) is None:
        if not is_timm_model(model):
            return ModelWithMetadata(model, labels=names)
        set_labels(model, names)
    elif list(map_classes(names, num_classes=len(own), labels=own).numbers.values()) != list(range(len(own))):
        raise UsageError("the folders have the names of the model's classes; pass these to open_dataset as labels=")
    return model


class _Evaluation:
    """All trials of one evaluation, in one folder."""

    def __init__(self, plan: EvaluationContext, folder: Path, interrupts: Interrupts) -> None:
        self._plan, self._folder, self._interrupts = plan, folder, interrupts
        in_workers = plan.options.engine != "serial" or (plan.options.resume and (folder / TRIALS).exists())
        self._packed = pickle.dumps(plan) if in_workers else None

    def execute(self, source_data: str | Path | None = None) -> dict[str, Any]:
        folder, options = self._folder, self._plan.options
        self._plan.check_methods()
        if options.engine == "ray":
            connected()  # before an earlier evaluation is touched
        lock = FolderLock(folder)
        remove_leftovers(folder, (RESULTS, TABLE, PROGRESS))
        for name, pattern in _KEPT_IN.items():
            remove_leftovers(folder / name, (pattern,))
        try:
            check_free(folder, RESULTS, overwrite=options.overwrite, resume=options.resume)
            if source_data is not None:
                self._plan.learn(source_data, self._interrupts.check)
            return self._run_or_resume()
        except UsageError:
            raise
        except Exception as error:
            with contextlib.suppress(RemttaError):  # report the first error
                earlier = read_earlier(folder / RESULTS)
                if earlier["status"] == "running":
                    write_json(folder / RESULTS, {**earlier, "status": f"error: {first_line(error)}"})
            raise
        finally:
            lock.release()

    def _run_or_resume(self) -> dict[str, Any]:
        plan, folder, record = self._plan, self._folder, self._folder / RESULTS
        methods = list(plan.methods)
        if plan.options.resume and record.exists():
            with reading(record, UsageError):
                earlier = read_earlier(record)
                whole = earlier["status"] == "completed"
                progress, state = (
                    (EvaluationProgress(), {}) if whole else load_position(folder / PROGRESS, EvaluationProgress)
                )
                finished = set(earlier["methods"]) if whole else {trial["method"] for trial in progress.finished}
                methods = plan.order_after(earlier["settings"], folder, finished)
                same = [list(earlier["settings"]["methods"]), earlier["settings"]["options"]["seeds"]]
                if whole and same == [list(plan.methods), list(plan.options.seeds)]:
                    _log.info("the evaluation in %s is complete", folder)
                    return earlier
                if whole:
                    progress = EvaluationProgress.of_completed(folder, earlier)
                elif self._current(earlier["settings"], progress) != self._current(plan.settings(), progress, methods):
                    progress.drop_current()
                    state = {}
            self._resume(earlier, methods, progress, state)
        else:
            self._begin()
            progress, state = EvaluationProgress(), {}
        eventful, every_s = any(map(is_guarded, methods)), plan.options.save_every_s
        with TrialWriter(folder, progress, save_every_s=every_s, eventful=eventful) as ledger:
            left = progress.left(methods, plan.options.seeds)
            while left and (self._packed is None or progress.position.frames):  # finish here what was begun here
                ledger.finish(self._run_trial(*left.pop(0), ledger, state))
                state = {}
            if left:
                self._run_in_workers(left, ledger)
        results = self._results(progress.finished)
        with writing(folder / PROGRESS):
            (folder / PROGRESS).unlink(missing_ok=True)
        return results

    def _run_trial(self, name: str, seed: int, ledger: TrialWriter, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run a trial, resuming from `state` if it was interrupted, and return its record."""
        torch.manual_seed(seed)
        try:
            with self._plan.pipeline(name) as pipeline:
                return Trial(self._plan, name, seed, pipeline, ledger, self._interrupts).run(state)
        except RemttaError as error:
            raise type(error)(f"{name}, seed {seed}: {error}") from error

    def _run_in_workers(self, trials: Sequence[tuple[str, int]], ledger: TrialWriter) -> None:
        """Run trials in workers, then copy their rows, events and deltas in order, as if they had run here."""
        folders = [self._folder / TRIALS / f"{name}_seed{seed}" for name, seed in trials]
        tasks, now = list(zip(trials, folders, strict=True)), json.loads(json.dumps(self._plan.settings()["methods"]))
        for (name, _), folder in tasks:
            begun = (folder / RESULTS).exists() and read_earlier(folder / RESULTS)["settings"]["methods"].get(name)
            if begun and begun != now[name]:
                shutil.rmtree(folder)
        with contextlib.closing(self._worker_results(tasks)) as finished_trials:
            whole = (trials[position] for position, is_whole in finished_trials if is_whole)  # others follow a stop
            for number, (name, seed) in enumerate(whole, 1):
                _log.info("%s, seed %d: done, %d of %d runs", name, seed, number, len(trials))
        for (name, seed), folder in tasks:
            events, delta = folder / EVENTS, delta_path(folder, name, seed)
            ledger.write(read_rows(folder / PREDICTIONS), read_rows(events) if events.exists() else ())
            if delta.exists():
                target = delta_path(self._folder, name, seed)
                with writing(target):
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(delta, target)
            ledger.finish(read_earlier(folder / RESULTS)["methods"][name]["seeds"][str(seed)])
        shutil.rmtree(self._folder / TRIALS)

    def _worker_results(self, tasks: Sequence[_Task]) -> Generator[tuple[int, bool]]:
        options, gpus = self._plan.options, int(self._plan.card.device.type == "cuda")
        shared: _Shared = self._packed, self._plan.learned, torch.get_num_threads()
        if options.engine == "ray":
            return on_ray(_run_task, shared, tasks, interrupts=self._interrupts, gpus=gpus)
        serial = options.engine == "serial"  # it continues what workers began
        jobs = 1 if serial else options.jobs or gpus or num_cores()  # on a GPU, one unless more are requested
        return in_processes(_run_task, shared, tasks, jobs=jobs, interrupts=self._interrupts)

    def _begin(self) -> None:
        """Prepare the folder: remove what is left of an earlier evaluation."""
        folder = self._folder
        with writing(folder):
            (folder / PROGRESS).unlink(missing_ok=True)
            shutil.rmtree(folder / TRIALS, ignore_errors=True)
            if (folder / RESULTS).exists():  # keep the files of a folder that is not an evaluation
                for pattern in (TABLE, EVENTS, *(f"{name}/{pattern}" for name, pattern in _KEPT_IN.items())):
                    for path in folder.glob(pattern):
                        path.unlink()
                for name in _KEPT_IN:
                    with contextlib.suppress(OSError):  # absent, or it holds other files
                        (folder / name).rmdir()
        write_json(folder / RESULTS, {"status": "running", "settings": self._plan.settings()})

    def _current(self, settings: Mapping[str, Any], progress: EvaluationProgress, methods: Sequence[str] = ()) -> Any:
        """Return name, seed and settings of the trial that follows the finished ones, if it has begun."""
        if not progress.position.frames:
            return None
        name, seed = progress.left(methods or settings["methods"], settings["options"]["seeds"])[0]
        return name, seed, json.loads(json.dumps(settings["methods"][name]))

    def _resume(
        self,
        earlier: Mapping[str, Any],
        methods: Sequence[str],
        progress: EvaluationProgress,
        state: Mapping[str, Tensor],
    ) -> None:
        """Save the progress, and record methods and seeds that were added, changed or left out since."""
        save_state(self._folder / PROGRESS, asdict(progress), state)  # before the record claims that it exists
        if progress.finished or progress.position.frames:
            runs, images = counted(len(progress.finished), "run"), counted(progress.position.frames, "image")
            _log.info("resuming after %s and %s", runs, images)
        settings = self._plan.settings()
        settings["methods"] = {name: settings["methods"][name] for name in methods}  # for the next --resume
        write_json(self._folder / RESULTS, {**earlier, "status": "running", "settings": settings})

    def _results(self, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, methods, rows = self._plan, list(self._plan.methods), self._folder / PREDICTIONS
        domains = list(dict.fromkeys(domain.name for domain in plan.dataset.domains))
        tallies = tally_rows(rows, by_path=len(plan.dataset.domains) == 1)
        order = list(itertools.product(methods, plan.options.seeds))
        in_order = sorted(trials, key=lambda trial: order.index((trial["method"], trial["seed"])))
        made_with = environment(plan.card.device)
        del made_with["command"]  # differs after --resume, and the settings cover it
        content: dict[str, Any] = {
            "status": "completed",
            "methods": summarise(tallies, in_order, domains, len(plan.numbers)),
            "settings": plan.settings(),
            "environment": made_with,
        }
        if plan.options.scenario == "recurring":
            adapted = sum(domain.name not in plan.options.unseen for domain in plan.dataset.domains)
            for name, errors in errors_by_round(rows, adapted).items():
                content["methods"][name]["error_by_round"] = errors
        table = partial(Path.write_text, data=markdown_table(content), encoding="utf-8")
        write_atomically(self._folder / TABLE, table)
        write_json(self._folder / RESULTS, content)  # last, as it marks completion
        return content


def _run_task(shared: _Shared, task: _Task, stop: Callable[[], int]) -> bool:
    """Run or resume a trial in a folder of its own; return False if it was stopped."""
    (packed, learned, threads), ((name, seed), folder) = shared, task
    torch.set_num_threads(threads)
    assert packed is not None
    plan: EvaluationContext = pickle.loads(packed)  # includes a copy of the model
    options = replace(plan.options, engine="serial", seeds=(seed,), resume=True, overwrite=False)
    own = {each: what for each, what in learned.items() if each == name}
    plan = replace(plan, methods={name: plan.methods[name]}, options=options, learned=own)
    with contextlib.suppress(Stopped):
        _Evaluation(plan, folder, WorkerInterrupts(stop)).execute()
        return True
    return False
