"""Run methods over labelled domains; every number comes from the rows this writes."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.deltas.delta import Delta, check_base
from remtta.engines.interrupts import Interrupts
from remtta.errors import UsageError
from remtta.evaluation.datasets import Dataset
from remtta.evaluation.earlier import progress_of_completed, read_earlier, run_order
from remtta.evaluation.grid import RUNS, Grid
from remtta.evaluation.ledger import PROGRESS, Ledger
from remtta.evaluation.outputs import CONFUSION, TABLES, write_results
from remtta.evaluation.plan import EvalPlan, checked_methods
from remtta.evaluation.progress import Position, Progress, load_progress, save_progress
from remtta.evaluation.results import DELTAS, PLOTS, errors_by_round, summarise, tally_rows
from remtta.evaluation.scenarios import plan_visits
from remtta.evaluation.trial import Trial
from remtta.files import FolderLock, remove_leftovers, write_json, writing
from remtta.guard.adapter import Adapter
from remtta.guard.guard import guarded
from remtta.guard.smoothing import Smoother
from remtta.methods.method import Method, build_method
from remtta.methods.settings import MethodConfig
from remtta.methods.settings.names import action_of, answer_of, is_guarded, is_smoothed, method_of
from remtta.methods.source_data import check_source_data, learn_from_source
from remtta.models.card import card_of, labels_of, set_labels
from remtta.models.hashing import state_sha256
from remtta.models.heads import restricted_classes
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.options import EvalOptions
from remtta.runs.environment import environment
from remtta.runs.folder import EVENTS, PREDICTIONS, RESULTS

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
    numbers = dataset.class_numbers if dataset.restricted_to else None
    packed = None if options.engine == "serial" else pickle.dumps(model)
    with restricted_classes(model, numbers):
        card = card_of(model, preprocessing, base_sha256)
        outputs = range(card.num_classes) if numbers is None else numbers
        visits = {seed: plan_visits(dataset, options, seed) for seed in options.seeds}
        plan = EvalPlan(model, card, dataset, chosen, options, visits, outputs, delta)
        return _Evaluation(plan, Path(output), interrupts or Interrupts(), packed).execute(source_data)


class _Evaluation:
    """All runs of one evaluation, in one folder."""

    def __init__(self, plan: EvalPlan, folder: Path, interrupts: Interrupts, packed: bytes | None) -> None:
        self._plan, self._folder, self._interrupts = plan, folder, interrupts
        self._packed = packed  # the model for workers, if there are to be any

    def execute(self, source_data: str | Path | None) -> dict[str, Any]:
        _check_additions(self._plan)
        folder = self._folder
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        remove_leftovers(folder, (RESULTS, *TABLES, PROGRESS))
        remove_leftovers(folder / DELTAS, ("*.safetensors",))
        remove_leftovers(folder / CONFUSION, ("*.csv",))
        try:
            if source_data is not None:
                self._refuse_earlier()
                self._learn_from_source(source_data)
            return self._go()
        finally:
            lock.release()

    def _go(self) -> dict[str, Any]:
        plan, earlier = self._plan, self._earlier()
        methods = list(plan.methods)
        if earlier:
            methods = run_order(self._folder, earlier["settings"], plan.settings())
            if earlier["status"] == "completed" and list(earlier["settings"]["methods"]) == list(plan.methods):
                _log.info("the evaluation in %s is complete", self._folder)
                return earlier
            progress, state = self._go_on(earlier, methods)
        else:
            progress, state = self._begin(), {}
        eventful, every_s = any(map(is_guarded, methods)), plan.options.save_every_s
        with Ledger(self._folder, progress, save_every_s=every_s, eventful=eventful) as ledger:
            runs = list(itertools.product(methods, plan.options.seeds))
            runs = runs[len(progress.finished) :]
            here = runs if self._packed is None else runs[: bool(state)]  # one that was begun here ends here
            for name, seed in here:
                progress.finished.append(self._one(name, seed, ledger, state))
                progress.position, state = Position(), {}
                ledger.save_finished()
            if self._packed is not None and (elsewhere := runs[len(here) :]):
                self._grid(self._packed).run(elsewhere, ledger, self._interrupts)
        results = self._results(progress.finished)
        with writing(self._folder / PROGRESS):
            (self._folder / PROGRESS).unlink(missing_ok=True)
        return results

    def _grid(self, packed: bytes) -> Grid:
        plan = self._plan
        return Grid(
            model=packed,
            dataset=plan.dataset,
            folder=self._folder,
            methods=plan.methods,
            options=plan.options,
            preprocessing=plan.card.preprocessing,
            delta=plan.start,
            learned={name: learned["path"] for name, learned in plan.learned.items()},
            threads=torch.get_num_threads(),
            gpus=int(plan.card.device.type == "cuda"),
        )

    def _one(self, name: str, seed: int, ledger: Ledger, state: Mapping[str, Tensor]) -> dict[str, Any]:
        """A method's run with a seed, from where it stopped with this state."""
        torch.manual_seed(seed)
        method = build_method(method_of(name), self._plan.model, self._plan.methods[name])
        try:
            method.reset()
            adapter = _adapter(self._plan, name, method)
            if name in self._plan.learned:
                self._learn(method, name, self._plan.learned[name]["path"])
            return Trial(self._plan, name, seed, adapter, ledger, self._interrupts).run(state)
        finally:
            method.reset()

    def _learn_from_source(self, source_data: str | Path) -> None:
        """Have the statistics of every method that needs some on the disk, before anything is recorded."""
        for name, config in self._plan.methods.items():
            method = build_method(method_of(name), self._plan.model, config)
            if method.objective.needs_source:
                self._plan.learned[name] = self._learn(method, name, source_data, self._interrupts.check)

    def _learn(
        self, method: Method, name: str, source_data: str | Path, wait: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        chosen, crop_pct = self._plan.card.preprocessing, preprocessing_of(self._plan.model).crop_pct
        # Domains of the input size are taken as they are, which does not say how to crop photographs.
        as_they_are = chosen.crop_pct == 1 and set(self._plan.dataset.sizes) == {chosen.input_size[::-1]}
        return learn_from_source(
            method,
            self._plan.model,
            source_data,
            method=method_of(name),
            config=self._plan.methods[name],
            preprocessing=replace(chosen, crop_pct=crop_pct) if as_they_are else chosen,
            fitting_as_they_are=as_they_are and crop_pct != 1,
            wait=wait,
        )

    def _refuse_earlier(self) -> None:
        earlier = [name for name in (RESULTS, PREDICTIONS) if (self._folder / name).exists()]
        if earlier == [PREDICTIONS] and self._plan.options.resume:
            raise UsageError(f"{self._folder} has lost its {RESULTS}, so it cannot go on; --overwrite replaces it")
        if earlier and not (self._plan.options.overwrite or self._plan.options.resume):
            raise UsageError(
                f"{self._folder} holds an earlier evaluation; go on with it by --resume, replace it by --overwrite, "
                "or choose another --output"
            )

    def _remove_earlier(self) -> None:
        """Remove what an earlier evaluation left that this one may not write itself; a folder of others stays."""
        if not (self._folder / RESULTS).exists():
            return
        patterns = (*TABLES, EVENTS, f"{DELTAS}/*.safetensors", f"{PLOTS}/*.png", f"{CONFUSION}/*.csv")
        for pattern in patterns:
            for path in self._folder.glob(pattern):
                path.unlink()
        for name in (DELTAS, PLOTS, CONFUSION):
            with contextlib.suppress(OSError):  # absent, or it holds something else
                (self._folder / name).rmdir()

    def _begin(self) -> Progress:
        """Make the folder ready for a new evaluation."""
        self._refuse_earlier()
        with writing(self._folder):
            (self._folder / PROGRESS).unlink(missing_ok=True)
            shutil.rmtree(self._folder / RUNS, ignore_errors=True)
            self._remove_earlier()
        write_json(self._folder / RESULTS, {"status": "running", "settings": self._plan.settings()})
        return Progress()

    def _earlier(self) -> dict[str, Any] | None:
        """The results, so far, of the evaluation to go on with; None where there is or is meant to be none."""
        record = self._folder / RESULTS
        return read_earlier(record) if self._plan.options.resume and record.exists() else None

    def _go_on(self, earlier: Mapping[str, Any], methods: Sequence[str]) -> tuple[Progress, dict[str, Tensor]]:
        """How far the evaluation in the folder has come, which may have got more methods since it began."""
        if earlier["status"] == "completed":
            progress = progress_of_completed(self._folder, earlier)
            state: dict[str, Tensor] = {}
            save_progress(self._folder / PROGRESS, progress, state)  # before the record says that there is one
        else:
            progress, state = load_progress(self._folder / PROGRESS)
        if progress.finished or progress.position.frames:
            _log.info("going on after %d run(s) and %d images", len(progress.finished), progress.position.frames)
        settings = self._plan.settings()
        in_order = {name: settings["methods"][name] for name in methods}  # by which a next --resume goes
        write_json(
            self._folder / RESULTS, {**earlier, "status": "running", "settings": {**settings, "methods": in_order}}
        )
        return progress, state

    def _results(self, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        plan, methods = self._plan, list(self._plan.methods)
        order = list(dict.fromkeys(domain.name for domain in plan.dataset.domains))
        tallies = tally_rows(self._folder / PREDICTIONS)
        in_order = sorted(runs, key=lambda run: methods.index(run["method"]))
        made_with = environment(plan.card.device)
        del made_with["command"]  # differs after --resume, and the settings say all it says
        content: dict[str, Any] = {
            "status": "completed",
            "methods": summarise(tallies, in_order, order, len(plan.numbers)),
            "settings": plan.settings(),
            "environment": made_with,
        }
        if plan.options.scenario == "recurring":
            adapted = sum(domain.name not in plan.options.unseen for domain in plan.dataset.domains)
            for name, errors in errors_by_round(self._folder / PREDICTIONS, adapted).items():
                content["methods"][name]["error_by_round"] = errors
        names = dict(zip(plan.numbers, plan.card.labels or (), strict=False))
        write_results(self._folder, content, tallies, names)
        return content


def _check_additions(plan: EvalPlan) -> None:
    """Refuse a guard of a method that cannot have one, before anything is run."""
    for name, config in plan.methods.items():
        if is_guarded(name):
            method = build_method(method_of(name), plan.model, config)
            try:
                _adapter(plan, name, method)
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
            finally:
                method.reset()


def _adapter(plan: EvalPlan, name: str, method: Method) -> Adapter:
    """A method with what its name adds to it."""
    wanted, config = plan.options.guard, plan.methods[name]
    options = replace(wanted, action=action_of(name, wanted.action), answer=answer_of(name))
    guard = guarded(method, options, config)
    if is_guarded(name) and (guard is None or guard.options.action == "off"):
        raise UsageError(f"{method_of(name)} changes no weights that a guard could put back; leave +guard out")
    smoother = Smoother(len(plan.numbers)) if is_smoothed(name) else None
    return Adapter(method, [each for each in (guard, smoother) if each])
