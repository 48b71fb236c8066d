"""Many streams on one model in this process: a thread each, which use the model in turns, with their own weights."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import nn

from remtta.adapt.context import log_context, prepare_run
from remtta.adapt.stream_group import StreamGroup, StreamGroupSummary, StreamReport
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import RemttaError, UsageError
from remtta.models.card import card_of
from remtta.options import RunOptions
from remtta.pipeline.accuracy import Estimator
from remtta.pipeline.build import AdaptationConfig
from remtta.pipeline.pipeline import Pipeline
from remtta.runs.folder import RECORD
from remtta.runs.run import Run
from remtta.streams.batches import decoding_budget
from remtta.streams.sources import Stream
from remtta.watching.health import vitals
from remtta.watching.metrics import sample

_POLL_S = 0.1

_log = logging.getLogger("remtta")
_stream: ContextVar[str | None] = ContextVar("stream", default=None)


class Turns:
    """Runs the work of many threads in one thread, first come, first served.

    A thread submits its next work only when the last is done, so it waits at most for one batch of each other thread,
    and idle threads delay nobody. With a single worker thread, the model's memory and torch's threads are those of a
    single run.
    """

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "remtta-model")

    def take(self, work: Callable[[], object], interrupts: Interrupts) -> None:
        """Run work in the worker thread, and wait for it; raise what it raises, or Stopped if a stop comes before its
        turn, unless held off.
        """
        turn = self._worker.submit(copy_context().run, work)
        while not wait([turn], timeout=_POLL_S).done:
            try:
                interrupts.check()
            except Stopped:
                if turn.cancel():
                    raise
        turn.result()

    def close(self) -> None:
        """End the worker thread."""
        self._worker.shutdown()


class TurnTaker:
    """Calls functions with one pipeline's adapted weights in a model that others share, in its turn.

    Between its turns the model has its source weights.
    """

    def __init__(self, pipeline: Pipeline, turns: Turns, interrupts: Interrupts) -> None:
        self._weights, self._turns, self._interrupts = pipeline.method.model.weights, turns, interrupts

    def __call__(self, work: Callable[[], None]) -> None:
        """Call `work`; raise Stopped if a stop comes before."""
        self._turns.take(partial(self._with_weights, work), self._interrupts)

    def _with_weights(self, work: Callable[[], None]) -> None:
        self._weights.enter()
        try:
            work()
        finally:
            self._weights.leave()


class SharedModelRunner(StreamGroup):
    """The runs of streams that share a model. Raise UsageError if the method changes more than norms, or a stream
    cannot use it; DeltaError if the delta does not fit the model.

    Args:
        model: The model at its source weights.
        on_batch: Called after every batch of any stream.
        on_change: Called before the first batch, when a stream has ended, and at the end.
        options_of: Returns the options of a stream; by default those of the setup.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Mapping[str, Stream],
        folder: Path,
        setup: AdaptationConfig,
        interrupts: Interrupts,
        *,
        on_batch: Callable[[StreamGroupSummary], None] | None = None,
        on_change: Callable[[], None] | None = None,
        options_of: Callable[[str], RunOptions] | None = None,
    ) -> None:
        self._turns, self._interrupts = Turns(), interrupts
        self._on_batch, self._reporting = on_batch, threading.Lock()
        self._changed = on_change or self.write
        self._runs: dict[str, Run] = {}
        card = card_of(model)
        memory, chosen = decoding_budget(setup.options, card.preprocessing), setup
        for name, stream in streams.items():
            options = options_of(name) if options_of else setup.options
            resumes = options.resume and (folder / name / RECORD).exists()
            own = replace(setup if resumes else chosen, options=options)
            context = prepare_run(model, card, stream, folder / name, own, interrupts.check)
            if not context.pipeline.method.norms_only:
                raise UsageError(
                    f"{context.method} changes every weight, so the streams of --streams could not share a model; run "
                    "it on each source by itself, or choose a method that trains norms"
                )
            context.pipeline.method.model.weights.leave()
            if not resumes:  # a micro-batch is chosen once, and the estimate calibrated; a resumed run has its own
                estimator = context.pipeline.find(Estimator)
                calibration = None if estimator is None else estimator.calibration
                chosen = replace(setup, config=context.config, calibration=calibration)
            part = interrupts.part()  # of run and adapter: a stop that the run holds off ends no wait for a turn
            turns = TurnTaker(context.pipeline, self._turns, part)
            context = replace(context, with_model=turns, memory=memory)
            self._runs[name] = Run(context, folder / name, on_batch=lambda run: self._report_batch(), interrupts=part)
        super().__init__(folder, streams, {name: run.summary for name, run in self._runs.items()})

    def log_context(self) -> None:
        """Log what is about to run."""
        log_context(next(iter(self._runs.values())).context)

    def execute(self) -> None:
        self._changed()
        threads = [
            threading.Thread(target=self._run, args=(name,), name=f"remtta-{name}", daemon=True) for name in self._runs
        ]
        with _named_messages(), self._interrupts.finishing(), contextlib.closing(self._turns):
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(_POLL_S)  # on Windows, a signal does not end `join`
            self._changed()

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
            self._turns.take(self._changed, Interrupts())

    def reports(self) -> dict[str, StreamReport]:
        return {
            name: {
                "summary": {**asdict(run.summary), "output": str(run.summary.output)},
                "vitals": vitals(run),
                "metrics": sample(run),
            }
            for name, run in self._runs.items()
        }

    def _report_batch(self) -> None:
        with self._reporting:
            if self._on_batch:
                self._on_batch(self.summary)


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
