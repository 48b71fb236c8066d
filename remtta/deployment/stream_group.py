"""The runs of many streams together, and those on one model in this process.

There, each stream has a thread and its own weights; the threads use the model in turns.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from remtta.adapt.one_stream import log_context, prepare_run
from remtta.deployment.group_callback import GroupCallback
from remtta.deployment.health import vitals
from remtta.deployment.metrics import Sample, sample
from remtta.errors import RemttaError, UsageError
from remtta.files import FolderLock, remove_leftovers, write_json
from remtta.interrupts import Interrupts, Stopped
from remtta.models.info import model_info
from remtta.models.weights import AdaptedWeights
from remtta.options import RunOptions
from remtta.pipeline.accuracy import Estimator
from remtta.pipeline.build import AdaptationConfig
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.folder import RECORD, STREAM_GROUP
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from remtta.streams.prefetch import decoding_threads
from remtta.streams.sources import Stream

_POLL_S = 0.1

_log = logging.getLogger("remtta")
_stream: ContextVar[str | None] = ContextVar("stream", default=None)

StreamReport = Mapping[str, Any]
"""A report on a stream: `summary`, `vitals` and `metrics`, which JSON can represent."""


@dataclass(frozen=True)
class StreamGroupSummary:
    """Summary of the runs of many streams."""

    output: Path  # parent of the streams' folders
    streams: Mapping[str, RunSummary]  # summary of each run by its stream's name

    @property
    def signum(self) -> int | None:
        """The signal that stopped the runs, if any."""
        return next((run.signum for run in self.streams.values() if run.signum is not None), None)

    @property
    def exit_reason(self) -> str:
        """The streams' most important reason: "running", "completed", a signal's name, "error: ..." or "guard"."""
        reasons = [run.exit_reason for run in self.streams.values()]
        failed = sum(reason.startswith("error") for reason in reasons)
        stopped = next((run.exit_reason for run in self.streams.values() if run.signum is not None), None)
        if "running" in reasons or stopped:
            return stopped or "running"
        if failed:
            return f"error: {failed} of {len(reasons)} streams failed"
        return "guard" if "guard" in reasons else "completed"

    @property
    def num_frames(self) -> int:
        """Number of frames seen, over all streams."""
        return sum(run.num_frames for run in self.streams.values())

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps taken."""
        return sum(run.num_updates for run in self.streams.values())

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, over all streams and all parts of their runs."""
        seconds = max((run.seconds for run in self.streams.values()), default=0.0)
        return sum(run.num_predicted for run in self.streams.values()) / seconds if seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """Return the numbers of the report, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "streams": {name: run.figures() for name, run in self.streams.items()},
        }

    def report(self) -> str:
        """Return one line per stream for the user."""
        width = max(map(len, self.streams))
        lines = [f"{name:<{width}}  {run.report().partition(chr(10))[0]}" for name, run in self.streams.items()]
        again = [f"continue with --output {self.output} --resume"] if self.signum else []
        return "\n".join([*lines, str(self.output / STREAM_GROUP), *again])


@dataclass(frozen=True)
class StreamGroupConfig:
    """The settings of a group of streams."""

    model: nn.Module  # at its source weights
    streams: Mapping[str, Stream]
    folder: Path  # parent of the streams' folders
    setup: AdaptationConfig
    interrupts: Interrupts
    callbacks: Sequence[GroupCallback] = ()


class StreamGroup(abc.ABC):
    """The runs of many streams."""

    def __init__(self, config: StreamGroupConfig, runs: Mapping[str, RunSummary]) -> None:
        self._config, self.folder = config, config.folder
        self.summary = StreamGroupSummary(config.folder, runs)

    @abc.abstractmethod
    def execute(self) -> None:
        """Run all streams to their ends."""

    @abc.abstractmethod
    def reports(self) -> Mapping[str, StreamReport]:
        """Return a report on each stream; can be called at any time from any thread."""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; create the folder if needed, and remove it again if it stays empty."""
        made = not self.folder.exists()
        lock = FolderLock(self.folder)
        remove_leftovers(self.folder, (STREAM_GROUP,))
        try:
            yield
        finally:
            lock.release()
            if made:
                with contextlib.suppress(OSError):  # there is something in it
                    self.folder.rmdir()

    def vitals(self) -> dict[str, Any]:
        """Return the content of the health file."""
        streams = {name: report["vitals"] for name, report in self.reports().items()}
        return {"state": self.summary.exit_reason.partition(":")[0], "streams": streams}

    def samples(self) -> dict[str, Sample]:
        """Return the values for the metrics."""
        return {name: report["metrics"] for name, report in self.reports().items()}

    def report(self) -> None:
        """Report the counts so far to the callbacks."""
        for callback in self._config.callbacks:
            callback.on_group_batch(self.summary)

    def write(self) -> None:
        """Replace `site.json`."""
        streams = {
            name: {"source": stream.name, "kind": stream.kind, **self.summary.streams[name].figures()}
            for name, stream in self._config.streams.items()
        }
        write_json(self.folder / STREAM_GROUP, {"exit_reason": self.summary.exit_reason, "streams": streams})


def _in_turn(worker: Executor, interrupts: Interrupts, work: Callable[[], object]) -> None:
    """Run work in the worker thread, first come, first served; raise what it raises, or Stopped if a stop comes before
    its turn, unless held off.

    A thread submits its next work only when the last is done, so it waits at most for one batch of each other thread,
    and idle threads delay nobody. With a single worker thread, the model's memory and torch's threads are those of a
    single run.
    """
    turn = worker.submit(copy_context().run, work)
    while not wait([turn], timeout=_POLL_S).done:
        try:
            interrupts.check()
        except Stopped:
            if turn.cancel():
                raise
    turn.result()


class _Reporter(Callback):
    """Reports the batches of a stream to its group, in the one thread that uses the model."""

    def __init__(self, group: StreamGroup) -> None:
        self._group = group

    def on_batch(self, report: BatchReport) -> None:
        self._group.report()


class SharedModelRunner(StreamGroup):
    """The runs of streams that share a model. Raise UsageError if the method changes more than norms, or a stream
    cannot use it; DeltaError if the delta does not fit the model.

    Args:
        options_of: In a worker, returns the options of a stream; the process that started it writes `site.json`.
    """

    def __init__(self, config: StreamGroupConfig, options_of: Callable[[str], RunOptions] | None = None) -> None:
        setup, interrupts = config.setup, config.interrupts
        self._worker = ThreadPoolExecutor(1, "remtta-model")
        self._write_site = self.write if options_of is None else lambda: None
        self._runs: dict[str, Run] = {}
        info = model_info(config.model)
        threads, chosen = decoding_threads(len(config.streams)), setup
        for name, stream in config.streams.items():
            folder, options = config.folder / name, options_of(name) if options_of else setup.options
            resumes = options.resume and (folder / RECORD).exists()
            own = replace(setup if resumes else chosen, options=options)
            context = prepare_run(config.model, info, stream, folder, own, interrupts.check)
            weights = context.pipeline.method.model.weights
            if not context.pipeline.method.norms_only:
                raise UsageError(
                    f"{context.method} changes every weight, so the streams of --streams could not share a model; run "
                    "it on each source by itself, or choose a method that trains norms"
                )
            weights.leave()
            if not resumes:  # a micro-batch is chosen once, and the estimate calibrated; a resumed run has its own
                estimator = context.pipeline.find(Estimator)
                calibration = None if estimator is None else estimator.calibration
                chosen = replace(setup, config=context.config, calibration=calibration)
            part = interrupts.for_thread()  # for run and turns: a stop that the run holds off ends no wait for a turn
            run_exclusively = partial(self._run_exclusively, weights, part)
            context = replace(context, run_exclusively=run_exclusively, decoding_threads=threads)
            self._runs[name] = Run(context, folder, part, [_Reporter(self)])
        super().__init__(config, {name: run.summary for name, run in self._runs.items()})

    def log_context(self) -> None:
        """Log what is about to run."""
        log_context(next(iter(self._runs.values())).context)

    def _run_exclusively(self, weights: AdaptedWeights, interrupts: Interrupts, work: Callable[[], None]) -> None:
        _in_turn(self._worker, interrupts, weights.active()(work))

    def execute(self) -> None:
        self._write_site()
        threads = [
            threading.Thread(target=self._run, args=(name,), name=f"remtta-{name}", daemon=True) for name in self._runs
        ]
        with _named_messages(), self._config.interrupts.deferred(), self._worker:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(_POLL_S)  # on Windows, a signal does not end `join`
            self._write_site()

    def _run(self, name: str) -> None:
        """Run one stream; its failure does not affect the others."""
        _stream.set(name)
        try:
            self._runs[name].execute()
        except BaseException as error:
            if self._runs[name].summary.ended != "error":  # the last record could not be written
                self._runs[name].summary.end(error)
            _log.error("%s", " ".join(str(error).split()) if isinstance(error, RemttaError) else repr(error))
            _log.debug("%s", traceback.format_exc())
        with contextlib.suppress(RemttaError):  # a failure of the last write is raised
            _in_turn(self._worker, Interrupts(), self._write_site)

    def reports(self) -> dict[str, StreamReport]:
        return {
            name: {
                "summary": {**asdict(run.summary), "output": str(run.summary.output)},
                "vitals": vitals(run),
                "metrics": sample(run),
            }
            for name, run in self._runs.items()
        }


@contextlib.contextmanager
def _named_messages() -> Iterator[None]:
    """Prefix log messages of a stream's run with its name."""

    def name_it(record: logging.LogRecord) -> bool:
        if name := _stream.get():
            record.msg, record.args = f"{name}: {record.getMessage()}", ()
        return True

    _log.addFilter(name_it)
    try:
        yield
    finally:
        _log.removeFilter(name_it)
