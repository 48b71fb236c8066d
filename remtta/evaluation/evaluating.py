"""Run methods over labelled domains: trials of a method and a seed each, here or by workers, in one folder."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.deltas.delta import Delta, check_base
from remtta.engines.interrupts import Interrupts, Stopped, Told
from remtta.engines.processes import in_processes, num_jobs
from remtta.errors import UsageError, counted
from remtta.evaluation.domains import Dataset
from remtta.evaluation.ledger import DELTAS, PLOTS, PROGRESS, Ledger, Progress, delta_path
from remtta.evaluation.plan import EvalPlan, checked_methods, read_earlier
from remtta.evaluation.results import CONFUSION, summarise, write_results
from remtta.evaluation.scenarios import plan_visits
from remtta.evaluation.tables import TABLES
from remtta.evaluation.tally import errors_by_round, tally_rows
from remtta.evaluation.trial import Trial
from remtta.files import FolderLock, remove_leftovers, write_json, writing
from remtta.methods.settings import MethodConfig
from remtta.methods.settings.names import is_guarded, method_of
from remtta.methods.source_data import check_source_data
from remtta.models.card import card_of, labels_of, set_labels
from remtta.models.hashing import state_sha256
from remtta.models.heads import restricted_classes
from remtta.models.preprocessing import Preprocessing
from remtta.options import EvalOptions
from remtta.runs.environment import environment
from remtta.runs.folder import EVENTS, PREDICTIONS, RESULTS
from remtta.runs.reading import read_rows

TRIALS = ".runs"  # those that workers make, each an evaluation in a folder of its own

_Shared = tuple[bytes | None, Mapping[str, Any], int]
"""The plan, packed with its model; what methods have learned; threads of torch."""

_Task = tuple[tuple[str, int], Path]
"""A trial's method and seed, and its folder."""

_KEPT_IN = {DELTAS: "*.safetensors", PLOTS: "*.png", CONFUSION: "*.csv"}

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
    `table.tex` and `table.csv`, a confusion matrix per method, a delta per seed and method that
    changes only norms, and, where a method is under the guard, its decisions to `events.jsonl`
    into the output folder.

    Args:
        model: A timm classifier, as from `load_model`; back at its source weights afterwards, however
            this ends. Where the data set says what its classes are called, it keeps their names.
        dataset: The domains, from `open_dataset`.
        output: Folder for the results.
        methods: Names in the order of the table, each METHOD, METHOD+guard and the like, or LABEL=METHOD for one
            more row of a method with other settings; with their settings, or None for the published ones.
        options: Scenario, batch size, seeds and the like.
        preprocessing: How images become inputs; by default as the model asks for.
        delta: Start every trial from these adapted weights, that of `source` too; a reset still goes to the source.
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
    if options.order is None:
        options = replace(options, order="shuffled" if dataset.shuffled else "stored")
    chosen = checked_methods(methods, options.batch_size)
    check_source_data(map(method_of, chosen), source_data)
    base_sha256 = state_sha256(model)
    if delta is not None:
        check_base(delta, base_sha256)
        if options.scenario == "episodic":
            raise UsageError("the episodic scenario begins every domain at the source weights; leave --delta out")
    if dataset.names and labels_of(model) is None:
        set_labels(model, dataset.names)
    plan_visits(dataset, options, options.seeds[0])  # refuses what the data set lacks
    numbers = dataset.class_numbers if dataset.restricted_to else None
    with restricted_classes(model, numbers):
        card = card_of(model, preprocessing, base_sha256)
        outputs = range(card.num_classes) if numbers is None else numbers
        plan = EvalPlan(model, card, dataset, chosen, options, outputs, delta)
        return _Evaluation(plan, Path(output), interrupts or Interrupts()).execute(source_data)


class _Evaluation:
    """All trials of one evaluation, in one folder."""

    def __init__(self, plan: EvalPlan, folder: Path, interrupts: Interrupts) -> None:
        self._plan, self._folder, self._interrupts = plan, folder, interrupts
        self._packed = None if plan.options.engine == "serial" else pickle.dumps(plan)  # for workers

    def execute(self, source_data: str | Path | None = None) -> dict[str, Any]:
        """Go from what is in the folder to the results."""
        folder = self._folder
        self._plan.check_guards()
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        remove_leftovers(folder, (RESULTS, *TABLES, PROGRESS))
        for name, pattern in _KEPT_IN.items():
            remove_leftovers(folder / name, (pattern,))
        try:
            if source_data is not None:
                self._refuse_earlier()
                self._plan.learn(source_data, self._interrupts.check)
            return self._go()
        finally:
            lock.release()

    def _go(self) -> dict[str, Any]:
        plan, folder, record = self._plan, self._folder, self._folder / RESULTS
        methods = list(plan.methods)
        if plan.options.resume and record.exists():
            earlier = read_earlier(record)
            methods = plan.order_after(earlier["settings"], folder)
            if earlier["status"] == "completed" and list(earlier["settings"]["methods"]) == list(plan.methods):
                _log.info("the evaluation in %s is complete", folder)
                return earlier
            progress, state = self._go_on(earlier, methods)
        else:
            self._begin()
            progress, state = Progress(), {}
        eventful, every_s = any(map(is_guarded, methods)), plan.options.save_every_s
        with Ledger(folder, progress, save_every_s=every_s, eventful=eventful) as ledger:
            left = list(itertools.product(methods, plan.options.seeds))[len(progress.finished) :]
            while left and (self._packed is None or progress.position.frames):  # one that was begun here ends here
                ledger.finish(self._try(*left.pop(0), ledger, state))
                state = {}
            if left:
                self._have_made(left, ledger)
        results = self._results(progress.finished)
        with writing(folder / PROGRESS):
            (folder / PROGRESS).unlink(missing_ok=True)
        return results

    def _try(self, name: str, seed: int, ledger: Ledger, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """Make a trial, from where it stopped with this state; return its record."""
        torch.manual_seed(seed)
        with self._plan.adapter(name) as adapter:
            return Trial(self._plan, name, seed, adapter, ledger, self._interrupts).run(state)

    def _have_made(self, trials: Sequence[tuple[str, int]], ledger: Ledger) -> None:
        """Have workers make trials, and take them over in their order as if they had been made here."""
        folders = [self._folder / TRIALS / f"{name}_seed{seed}" for name, seed in trials]
        tasks = list(zip(trials, folders, strict=True))
        with contextlib.closing(self._made(tasks)) as made:
            whole = (trials[position] for position, is_whole in made if is_whole)  # others follow a stop
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

    def _made(self, tasks: Sequence[_Task]) -> Generator[tuple[int, bool]]:
        options, gpus = self._plan.options, int(self._plan.card.device.type == "cuda")
        shared: _Shared = self._packed, self._plan.learned, torch.get_num_threads()
        if options.engine == "ray":
            from remtta.engines.cluster import on_ray

            return on_ray(_make, shared, tasks, interrupts=self._interrupts, gpus=gpus)
        jobs = num_jobs(options.jobs or gpus or None)  # of one GPU, one at a time unless more are asked for
        return in_processes(_make, shared, tasks, jobs=jobs, interrupts=self._interrupts)

    def _refuse_earlier(self) -> None:
        earlier = [name for name in (RESULTS, PREDICTIONS) if (self._folder / name).exists()]
        if earlier == [PREDICTIONS] and self._plan.options.resume:
            raise UsageError(f"{self._folder} has lost its {RESULTS}, so it cannot be resumed; --overwrite replaces it")
        if earlier and not (self._plan.options.overwrite or self._plan.options.resume):
            raise UsageError(
                f"{self._folder} holds an earlier evaluation; continue it with --resume, replace it with --overwrite, "
                "or choose another --output"
            )

    def _begin(self) -> None:
        """Make the folder ready: remove what an earlier evaluation left that this one may not write itself."""
        self._refuse_earlier()
        folder = self._folder
        with writing(folder):
            (folder / PROGRESS).unlink(missing_ok=True)
            shutil.rmtree(folder / TRIALS, ignore_errors=True)
            if (folder / RESULTS).exists():  # a folder of other things keeps them
                for pattern in (*TABLES, EVENTS, *(f"{name}/{pattern}" for name, pattern in _KEPT_IN.items())):
                    for path in folder.glob(pattern):
                        path.unlink()
                for name in _KEPT_IN:
                    with contextlib.suppress(OSError):  # absent, or it holds something else
                        (folder / name).rmdir()
        write_json(folder / RESULTS, {"status": "running", "settings": self._plan.settings()})

    def _go_on(self, earlier: Mapping[str, Any], methods: Sequence[str]) -> tuple[Progress, dict[str, Tensor]]:
        """How far the evaluation in the folder has come, which may have got more methods since it began."""
        if earlier["status"] == "completed":
            progress = Progress.of_completed(self._folder, earlier)
            state: dict[str, Tensor] = {}
            progress.save(self._folder, state)  # before the record says that there is one
        else:
            progress, state = Progress.load(self._folder)
        if progress.finished or progress.position.frames:
            runs, images = counted(len(progress.finished), "run"), counted(progress.position.frames, "image")
            _log.info("resuming after %s and %s", runs, images)
        settings = self._plan.settings()
        settings["methods"] = {name: settings["methods"][name] for name in methods}  # by which a next --resume goes
        write_json(self._folder / RESULTS, {**earlier, "status": "running", "settings": settings})
        return progress, state

    def _results(self, trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, methods, rows = self._plan, list(self._plan.methods), self._folder / PREDICTIONS
        domains = list(dict.fromkeys(domain.name for domain in plan.dataset.domains))
        tallies = tally_rows(rows)
        in_order = sorted(trials, key=lambda trial: methods.index(trial["method"]))
        made_with = environment(plan.card.device)
        del made_with["command"]  # differs after --resume, and the settings say all it says
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
        write_results(self._folder, content, tallies, dict(zip(plan.numbers, plan.card.labels or (), strict=False)))
        return content


def _make(shared: _Shared, task: _Task, stop: Callable[[], int]) -> bool:
    """Make a trial in a folder of its own, or go on with it, unless it is made already; False if it was stopped."""
    (packed, learned, threads), ((name, seed), folder) = shared, task
    torch.set_num_threads(threads)
    assert packed is not None
    plan: EvalPlan = pickle.loads(packed)  # with a model of its own
    options = replace(plan.options, engine="serial", seeds=(seed,), resume=True, overwrite=False)
    own = {each: what for each, what in learned.items() if each == name}
    plan = replace(plan, methods={name: plan.methods[name]}, options=options, learned=own)
    with contextlib.suppress(Stopped):
        _Evaluation(plan, folder, Told(stop)).execute()
        return True
    return False
