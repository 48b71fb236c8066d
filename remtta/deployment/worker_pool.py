"""Many streams divided among workers, each of which has its own copy of the model."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from remtta.deployment.health import HealthFile
from remtta.deployment.stream_group import SharedModelRunner, StreamGroup, StreamGroupConfig, StreamReport
from remtta.engines.cluster import on_ray
from remtta.engines.processes import DIED, WorkersDied, in_processes
from remtta.errors import OutputError, RemttaError, UsageError
from remtta.files import writing
from remtta.interrupts import Stopped, WorkerInterrupts
from remtta.models.info import model_info
from remtta.options import RunOptions
from remtta.options.run_options import Engine
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.folder import RECORD
from remtta.runs.reading import read_object, read_record
from remtta.runs.summary import RunProgress, RunSummary
from remtta.streams.sources import Stream

WORKERS = ".workers"
_EVERY_S = 0.5  # how often workers report, and reports are read

_log = logging.getLogger("remtta")

_Share = tuple[int, Sequence[str]]
"""A worker's number, and the names of its streams."""


@dataclass(frozen=True)
class _Common:
    """The data that all workers share."""

    model: bytes  # the classifier at its source weights, pickled
    streams: Mapping[str, Callable[[], Stream]]  # functions that open the streams
    folder: Path  # parent of the streams' folders; writable for all workers
    setup: AdaptationConfig
    before: Mapping[str, str | None]  # earlier runs in the streams' folders
    threads: int = field(default_factory=torch.get_num_threads)  # in each worker
    level: int = field(default_factory=_log.getEffectiveLevel)  # minimum level of log messages

    def options_of(self, name: str) -> RunOptions:
        """Return the options of a stream, whose run a dead worker may already have begun."""
        options = self.setup.options
        replaces = options.overwrite and _run_in(self.folder / name) == self.before[name]
        return options if replaces else replace(options, overwrite=False, resume=True)


class WorkerPoolRunner(StreamGroup):
    """The runs of streams that are divided among workers, which get copies of the model; raise UsageError if a worker
    could not open a stream.
    """

    def __init__(self, config: StreamGroupConfig, engine: Engine, jobs: int) -> None:
        folder, streams, setup = config.folder, config.streams, config.setup
        self._runs = {name: RunSummary(folder / name) for name in streams}
        super().__init__(config, self._runs)
        self._engine = engine
        reopen = {name: stream.reopen for name, stream in streams.items() if stream.reopen}
        if alone := [name for name in streams if name not in reopen]:
            raise UsageError(f"{alone[0]} has frames that no worker could read; open it with open_streams")
        for name in streams:
            if setup.options.resume and (folder / name / RECORD).exists():
                read_record(folder / name / RECORD)  # a damaged one is reported before any work
        jobs, names = min(jobs, len(streams)), list(streams)
        self._shares: list[_Share] = [(number, names[number::jobs]) for number in range(jobs)]
        before = {name: _run_in(folder / name) for name in streams}
        pickled = pickle.dumps(config.model)
        self._common = _Common(pickled, reopen, folder, setup, before)
        self._reports: dict[str, StreamReport] = {}
        self._written: list[str] | None = None  # states of the streams as written to `site.json`
        self._given_up: list[str] = []  # streams of workers that died again and again

    def execute(self) -> None:
        workers = self.folder / WORKERS
        shutil.rmtree(workers, ignore_errors=True)
        with writing(workers):
            workers.mkdir()
        ended: dict[str, RunSummary] = {}
        end: BaseException | None = None
        try:
            with self._watched(), contextlib.closing(self._worker_results()) as results:
                for _, runs in results:
                    ended |= runs
        except (Stopped, RemttaError) as error:
            end = error
        finally:
            shutil.rmtree(workers, ignore_errors=True)
        with self._config.interrupts.deferred():
            self._runs |= ended
            for run in self._runs.values():
                if end is not None and (run.exit_reason == "running" or run.signum is not None):
                    run.end(end)
            if self._written or not isinstance(end, UsageError):  # a refusal before anything ran leaves nothing
                self.write()
        if end is not None and not isinstance(end, Stopped | WorkersDied):  # these the summary reports
            raise end

    def _worker_results(self) -> Generator[tuple[int, dict[str, RunSummary]]]:
        callbacks: dict[str, Any] = {"interrupts": self._config.interrupts, "died": self._note_death}
        if self._engine == "ray":
            gpus = int(model_info(self._config.model).device.type == "cuda")
            return on_ray(_adapt, self._common, self._shares, gpus=gpus, **callbacks)
        return in_processes(_adapt, self._common, self._shares, jobs=len(self._shares), **callbacks)

    def _note_death(self, position: int, again: bool) -> None:
        names = self._shares[position][1]
        if again:
            _log.warning("%s: a worker process died; its work starts again", ", ".join(names))
        else:
            _log.error("%s: %s", ", ".join(names), DIED)
            self._given_up += names

    def reports(self) -> dict[str, StreamReport]:
        """Return the state of each stream as last reported by its worker."""
        return {name: _with_end(report, self._runs[name]) for name, report in self._reports.copy().items()}

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Collect the workers' reports in this block, and at its end."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), name="remtta-workers", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            with self._config.interrupts.deferred():
                done.set()
                watcher.join()

    def _watch(self, done: threading.Event) -> None:
        messages = [_Tail(_file(self.folder, number, ".log")) for number, _ in self._shares]
        last = False
        while not last:
            last = done.wait(_EVERY_S)
            for number, _ in self._shares:
                with contextlib.suppress(OSError, ValueError):  # no report yet
                    self._reports |= json.loads(_file(self.folder, number, ".json").read_bytes())["streams"]
            for tail in messages:
                tail.log_new()
            for name, report in self._reports.items():
                paths = {"output": self.folder / name, "progress": RunProgress(**report["summary"]["progress"])}
                self._runs[name] = RunSummary(**{**report["summary"], **paths})
            for name in self._given_up:
                if self._runs[name].ended is None:
                    self._runs[name].end(WorkersDied(DIED))
            states = [run.exit_reason for run in self._runs.values()]
            if self._reports and states != self._written:
                with contextlib.suppress(OutputError):  # a failure of the last write is raised
                    self.write()
                    self._written = states
            self.report()


class _Tail:
    """Log messages of a worker, read from its growing file."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_bytes = path, 0

    def log_new(self) -> None:
        with contextlib.suppress(OSError):  # no messages yet
            with open(self._path, "rb") as file:
                file.seek(self._num_bytes)
                lines = file.read().rpartition(b"\n")[0]
            self._num_bytes += len(lines) + bool(lines)
            for line in lines.splitlines():
                with contextlib.suppress(ValueError):  # a line left incomplete when the worker died
                    level, text = json.loads(line)
                    _log.log(level, "%s", text)


def _adapt(common: _Common, share: _Share, stopped: Callable[[], int]) -> dict[str, RunSummary]:
    """Run or resume a worker's streams; return nothing if it was stopped before they began."""
    number, names = share
    torch.set_num_threads(common.threads)
    with _messages(_file(common.folder, number, ".log"), common.level), contextlib.suppress(Stopped):
        model, streams = pickle.loads(common.model), {name: common.streams[name]() for name in names}
        config = StreamGroupConfig(model, streams, common.folder, common.setup, WorkerInterrupts(stopped))
        site = SharedModelRunner(config, common.options_of)
        if number == 0:
            site.log_context()
        health_file = HealthFile(_file(common.folder, number, ".json"), lambda: {"streams": site.reports()}, _EVERY_S)
        with contextlib.closing(health_file):
            site.execute()
        return dict(site.summary.streams)
    return {}


@contextlib.contextmanager
def _messages(path: Path, level: int) -> Iterator[None]:
    """Write log messages to a file in this block."""
    with writing(path):
        handler, earlier = logging.FileHandler(path, "a", "utf-8"), _log.level
    handler.format = lambda record: json.dumps([record.levelno, record.getMessage()])  # type: ignore[method-assign]
    handler.handleError = lambda record: None  # type: ignore[method-assign]  # the runs themselves report a full disk
    _log.addHandler(handler)
    _log.setLevel(level)
    try:
        yield
    finally:
        _log.setLevel(earlier)
        _log.removeHandler(handler)
        handler.close()


def _file(folder: Path, number: int, suffix: str) -> Path:
    return folder / WORKERS / f"{number}{suffix}"


def _run_in(folder: Path) -> str | None:
    """Return the name of the run in a folder, if there is one."""
    try:
        return read_object(folder / RECORD).get("run")
    except (RemttaError, ValueError):
        return None


def _with_end(report: StreamReport, run: RunSummary) -> StreamReport:
    """Return a stream's last report, with the end of its run if its worker could not report it."""
    if run.ended is None:
        return report
    failed, vitals, metrics = run.ended == "error", report["vitals"], report["metrics"]
    vitals = {**vitals, "state": run.ended, **({"reason": run.exit_reason} if failed else {})}
    ended = {name: (metrics["gauges"][name][0], value) for name, value in (("running", 0.0), ("failed", float(failed)))}
    return {**report, "vitals": vitals, "metrics": {**metrics, "gauges": {**metrics["gauges"], **ended}}}
