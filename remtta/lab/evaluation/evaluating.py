"""Evaluate methods on labelled domains: one trial per method and seed, here or in workers, in one folder."""

from __future__ import annotations

import contextlib
import logging
import pickle
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from remtta.deltas.delta import Delta, check_base
from remtta.engines.cluster import connected, on_ray
from remtta.engines.processes import in_processes
from remtta.errors import RemttaError, UsageError, counted, first_line
from remtta.files import FolderLock, remove_leftovers, write_json, writing
from remtta.interrupts import Interrupts, Stopped, WorkerInterrupts
from remtta.lab.evaluation.class_maps import map_classes
from remtta.lab.evaluation.context import EvaluationContext, read_earlier
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import EvalOptions
from remtta.lab.evaluation.results import Results, write_results, write_tables
from remtta.lab.evaluation.scenarios import plan_visits
from remtta.lab.evaluation.tally import TOP
from remtta.lab.evaluation.time_left import TimeLeft
from remtta.lab.evaluation.trial import Progress, Trial, no_progress
from remtta.lab.evaluation.trial_writer import (
    DELTAS,
    PLOTS,
    PROGRESS,
    EvaluationProgress,
    TrialRecord,
    TrialWriter,
    delta_path,
)
from remtta.lab.evaluation.variants import MethodVariant, parse_variants
from remtta.lab.heads import restricted_classes, restricted_tensors
from remtta.lab.tables import LATEX, TABLE, table_columns
from remtta.machine import num_cores
from remtta.methods.settings.base import MethodConfig
from remtta.methods.source_data import check_source_data
from remtta.methods.table import settings_of
from remtta.models.info import labels_of, model_info, set_labels
from remtta.models.metadata import ModelWithMetadata
from remtta.models.preprocessing import Preprocessing
from remtta.models.tensor_files import state_sha256
from remtta.models.unwrapping import is_timm_model
from remtta.runs.folder import EVENTS, PREDICTIONS, RESULTS, check_free
from remtta.runs.reading import read_rows, reading
from remtta.runs.record import environment
from remtta.runs.saving import load_position, save_state

TRIALS = ".runs"  # trials run by workers, each an evaluation in a folder of its own

_OUTPUTS = (TABLE, LATEX, EVENTS, f"{DELTAS}/*.safetensors", f"{PLOTS}/*.png")
"""Files of an evaluation besides its rows and record."""

_Shared = tuple[bytes | None, Mapping[str, dict[str, Any]], int]
"""The context, pickled with its model; source statistics of the methods; number of torch threads."""

_log = logging.getLogger(__name__)


class _Task(NamedTuple):
    """A trial to run in a worker, and its folder."""

    method: str
    seed: int
    folder: Path


@torch.random.fork_rng(devices=[])  # the caller's random numbers stay as they are
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
    progress: Progress = no_progress,
) -> Results:
    """Evaluate methods on labelled domains.

    Writes into the output folder `predictions.jsonl` (a row per image, method and seed), `results.json`, `table.md` and
    `table.tex`; also a delta per seed for each method that changes only norms, and the guard's decisions as
    `events.jsonl` if a method is guarded.

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
        progress: Shows the images of each trial that runs in this process.

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
    variants = parse_variants(methods)
    given = methods if isinstance(methods, Mapping) else dict.fromkeys(methods)
    configs = {name: _config(variants[name], settings, options.batch_size) for name, settings in given.items()}
    check_source_data((variant.method for variant in variants.values()), source_data)
    base_sha256 = state_sha256(model)
    if delta is not None:
        check_base(delta, base_sha256)
        if options.scenario == "episodic":
            raise UsageError("the episodic scenario starts every domain from the source weights; leave --delta out")
    if dataset.names:
        model = _with_class_names(model, dataset.names)
    plan_visits(dataset, options, options.seeds[0])  # refuses what the data set lacks
    restricted_to, num_classes = dataset.class_numbers if dataset.restricted_to else None, model_info(model).num_classes
    if delta is not None and restricted_to is not None:
        delta = replace(delta, tensors=restricted_tensors(delta.tensors, model, restricted_to))
    with restricted_classes(model, restricted_to):
        info = model_info(model, preprocessing, base_sha256)
        numbers = range(info.num_classes) if restricted_to is None else restricted_to
        adapted = dict.fromkeys(domain.name for domain in dataset.domains if domain.name not in options.unseen)
        parts = ["first", *["unseen"] * bool(options.unseen), *["revisit"] * options.revisit]
        table_columns(adapted, parts, ranked=len(numbers) > TOP, chosen=options.columns)  # refuses unknown ones
        context = EvaluationContext(model, info, dataset, variants, configs, options, numbers, num_classes, delta)
        context.check()
        return _Evaluation(context, Path(output), interrupts or Interrupts(), progress).execute(source_data)


def _config(variant: MethodVariant, given: MethodConfig | Mapping[str, Any] | None, batch_size: int) -> MethodConfig:
    """Return the config of a row, in fp32 unless told otherwise, so that rows compare."""
    if not isinstance(given, MethodConfig):
        given = {**variant.defaults, **(given or {})}
    config = settings_of(variant.method, given, batch_size=variant.batch_size or batch_size)
    return replace(config, precision="fp32") if config.precision == "auto" else config


def _with_class_names(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Name a model's classes by folders unless it has names; raise UsageError if folders give these another order."""
    if (labels := labels_of(model)) is None:
        if not is_timm_model(model):
            return ModelWithMetadata(model, labels=names)
        set_labels(model, names)
        return model
    mapped = map_classes(names, num_classes=len(labels), labels=labels, order="name")
    if mapped.matched_by == "class name" and [mapped.numbers[name] for name in names] != list(range(len(labels))):
        raise UsageError("the folders have the names of the model's classes; pass these to open_dataset as labels=")
    return model


class _Evaluation:
    """All trials of one evaluation, in one folder."""

    def __init__(
        self, context: EvaluationContext, folder: Path, interrupts: Interrupts, progress: Progress = no_progress
    ) -> None:
        self._context, self._folder, self._interrupts, self._progress = context, folder, interrupts, progress
        in_workers = context.options.engine != "serial" or (context.options.resume and (folder / TRIALS).exists())
        self._pickled = pickle.dumps(context) if in_workers else None

    def execute(self, source_data: str | Path | None = None) -> Results:
        folder, options = self._folder, self._context.options
        if options.engine == "ray":
            connected()  # before an earlier evaluation is touched
        lock = FolderLock(folder)
        for pattern in (*_OUTPUTS, RESULTS, PROGRESS):
            remove_leftovers((folder / pattern).parent, (Path(pattern).name,))
        try:
            check_free(folder, RESULTS, overwrite=options.overwrite, resume=options.resume)
            if source_data is not None:
                self._context.learn(source_data, self._interrupts.check)
            return self._resume() if options.resume and (folder / RESULTS).exists() else self._start()
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

    def _resume(self) -> Results:
        """Run the trials that remain, those of added or changed methods and added seeds included."""
        context, record = self._context, self._folder / RESULTS
        with reading(record, UsageError):
            earlier = read_earlier(record)
            settings, completed = earlier["settings"], earlier["status"] == "completed"
            progress, state = EvaluationProgress(), dict[str, Tensor]()
            if not completed:
                progress, state = load_position(self._folder / PROGRESS, EvaluationProgress)
            finished = earlier["methods"] if completed else {trial.method for trial in progress.finished}
            methods = context.order_after(settings, self._folder, finished)
            now = context.settings(methods)
            if completed:
                unchanged = [list(settings["methods"]), settings["options"]["seeds"]]
                if unchanged == [list(context.methods), list(context.options.seeds)]:
                    _log.info("the evaluation in %s is complete", self._folder)
                    present = {"environment": environment(context.info.device)}  # its command stands above the table
                    write_tables(self._folder, earlier | present, context.options.columns)
                    return earlier
                progress = EvaluationProgress.of_completed(self._folder, earlier)
            elif progress.current:
                name, seed = progress.current
                variants = [context.variants[method] for method in methods]
                is_next = progress.remaining(variants, context.options)[:1] == [(name, seed)]
                if not is_next or settings["methods"].get(name) != now["methods"].get(name):
                    progress.drop_current()
                    state = {}
        save_state(self._folder / PROGRESS, asdict(progress), state)  # before the record claims that it exists
        if progress.finished or progress.position.frames:
            runs, images = counted(len(progress.finished), "run"), counted(progress.position.frames, "image")
            _log.info("resuming after %s and %s", runs, images)
        write_json(record, {**earlier, "status": "running", "settings": now})
        return self._run_trials(methods, progress, state)

    def _start(self) -> Results:
        """Remove what is left of an earlier evaluation, and run all trials."""
        folder = self._folder
        with writing(folder):
            (folder / PROGRESS).unlink(missing_ok=True)
            shutil.rmtree(folder / TRIALS, ignore_errors=True)
            if (folder / RESULTS).exists():  # keep the files of a folder that is not an evaluation
                for path in [path for pattern in _OUTPUTS for path in folder.glob(pattern)]:
                    path.unlink()
                for name in (DELTAS, PLOTS):
                    with contextlib.suppress(OSError):  # absent, or it holds other files
                        (folder / name).rmdir()
        write_json(folder / RESULTS, {"status": "running", "settings": self._context.settings()})
        return self._run_trials(list(self._context.methods), EvaluationProgress(), {})

    def _run_trials(self, methods: Sequence[str], progress: EvaluationProgress, state: Mapping[str, Tensor]) -> Results:
        """Run the trials that remain, the first one from `state` if it was interrupted; return the results."""
        options, variants = self._context.options, [self._context.variants[name] for name in methods]
        has_events = any(variant.is_guarded for variant in variants)
        trials = progress.remaining(variants, options)
        with TrialWriter(self._folder, progress, save_every_s=options.save_every_s, has_events=has_events) as writer:
            while trials and (self._pickled is None or progress.current):  # finish here what was begun here
                progress.current = trials.pop(0)
                writer.finish(self._run_trial(*progress.current, writer, state))
                state = {}
            if trials:
                self._run_in_workers(trials, writer)
        results = write_results(self._folder, self._context, progress.finished)
        with writing(self._folder / PROGRESS):
            (self._folder / PROGRESS).unlink(missing_ok=True)
        return results

    def _run_trial(self, name: str, seed: int, writer: TrialWriter, state: Mapping[str, Tensor]) -> TrialRecord:
        torch.default_generator.manual_seed(seed)
        try:
            with self._context.pipeline(name) as pipeline:
                trial = Trial(self._context, name, seed, pipeline, writer, self._interrupts)
                with self._progress(f"{name}, seed {seed}") as show:
                    return trial.run(state, show)
        except RemttaError as error:
            raise type(error)(f"{name}, seed {seed}: {error}") from error

    def _run_in_workers(self, trials: Sequence[tuple[str, int]], writer: TrialWriter) -> None:
        """Run trials in workers, then copy their rows, events and deltas in order, as if they had run here."""
        tasks = [_Task(name, seed, self._folder / TRIALS / f"{name}_seed{seed}") for name, seed in trials]
        configs = self._context.settings()["methods"]
        for name, _, folder in tasks:
            begun = (folder / RESULTS).exists() and read_earlier(folder / RESULTS)["settings"]["methods"].get(name)
            if begun and begun != configs[name]:
                shutil.rmtree(folder)
        records: dict[_Task, TrialRecord] = {}
        time_left, jobs = TimeLeft(self._context), self._jobs
        with contextlib.closing(self._worker_results(tasks, jobs)) as results:
            for task in (tasks[number] for number, is_finished in results if is_finished):  # others follow a stop
                record = read_earlier(task.folder / RESULTS)["methods"][task.method]["seeds"][str(task.seed)]
                records[task] = TrialRecord.from_json(record)
                left = [other.method for other in tasks if other not in records]
                shown = f"; {time_left.after_trials(list(records.values()), left, jobs)}" if left and jobs else ""
                done = f"{len(records)} of {len(tasks)} runs{shown}"
                _log.info("%s, seed %d: done, %s", task.method, task.seed, done)
        for task in tasks:
            name, seed, folder = task
            events, delta = folder / EVENTS, delta_path(folder, name, seed)
            writer.write(read_rows(folder / PREDICTIONS), read_rows(events) if events.exists() else ())
            if delta.exists():
                target = delta_path(self._folder, name, seed)
                with writing(target):
                    target.parent.mkdir(exist_ok=True)
                    shutil.copyfile(delta, target)
            writer.finish(records[task])
        shutil.rmtree(self._folder / TRIALS)

    @property
    def _jobs(self) -> int | None:
        """Number of worker processes; None on a cluster."""
        options, gpus = self._context.options, int(self._context.info.device.type == "cuda")
        if options.engine == "serial":
            return 1  # to continue what workers began
        return None if options.engine == "ray" else options.jobs or gpus or num_cores()  # on a GPU, one by default

    def _worker_results(self, tasks: Sequence[_Task], jobs: int | None) -> Generator[tuple[int, bool]]:
        shared: _Shared = self._pickled, self._context.learned, torch.get_num_threads()
        if jobs is None:
            gpus = int(self._context.info.device.type == "cuda")
            return on_ray(_run_task, shared, tasks, interrupts=self._interrupts, gpus=gpus)
        return in_processes(_run_task, shared, tasks, jobs=jobs, interrupts=self._interrupts)


def _run_task(shared: _Shared, task: _Task, stop: Callable[[], int]) -> bool:
    """Run or resume a trial in a folder of its own; return False if it was stopped."""
    pickled, learned, threads = shared
    torch.set_num_threads(threads)
    assert pickled is not None
    context: EvaluationContext = pickle.loads(pickled)  # includes a copy of the model
    context = replace(
        context,
        methods={task.method: context.methods[task.method]},
        options=replace(context.options, engine="serial", seeds=(task.seed,), resume=True, overwrite=False),
        learned={name: statistics for name, statistics in learned.items() if name == task.method},
    )
    with contextlib.suppress(Stopped):
        _Evaluation(context, task.folder, WorkerInterrupts(stop)).execute()
        return True
    return False
