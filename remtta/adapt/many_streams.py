"""Many streams on one model: its frozen weights once; of each stream its own norms, optimizer, guard and folder."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from remtta.adapt.planning import default_config, plan_run, tell_plan
from remtta.adapt.turns import SharingAdapter, Turns
from remtta.deltas.delta import Delta
from remtta.engines.interrupts import Interrupts
from remtta.errors import RemttaError, UsageError
from remtta.files import FolderLock, write_json, writing
from remtta.methods.method import Method
from remtta.methods.settings import MethodConfig
from remtta.models.card import card_of
from remtta.options import RunOptions
from remtta.runs.folder import SITE, check_site, default_folder
from remtta.runs.record import Plan
from remtta.runs.run import Run
from remtta.runs.summary import RunSummary
from remtta.streams.batches import decoding_budget
from remtta.streams.sources import Stream
from remtta.watching.health import HealthFile, check_health_path, vitals
from remtta.watching.metrics import Metrics, Watched

_log = logging.getLogger("remtta")
_stream: ContextVar[str | None] = ContextVar("stream", default=None)


@dataclass(frozen=True)
class SiteSummary:
    """What the runs of a site came to.

    Attributes:
        output: The site's folder.
        streams: What each run came to, by its stream's name.
        began: When this part of them began, in seconds of the monotonic clock.
    """

    output: Path
    streams: Mapping[str, RunSummary]
    began: float = field(default_factory=time.monotonic)

    @property
    def signum(self) -> int | None:
        """The signal that stopped it, if one did."""
        return next((run.signum for run in self.streams.values() if run.signum is not None), None)

    @property
    def exit_reason(self) -> str:
        """ "running", "completed", a signal's name, "error: ..." or "guard": of several that which matters most."""
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
        """Frames seen, of all streams."""
        return sum(run.num_frames for run in self.streams.values())

    @property
    def num_updates(self) -> int:
        """Optimizer steps taken."""
        return sum(run.num_updates for run in self.streams.values())

    @property
    def images_per_s(self) -> float:
        """Predicted frames per second, of all streams and all parts of their runs."""
        seconds = max((run.seconds for run in self.streams.values()), default=0.0)
        return sum(run.num_predicted for run in self.streams.values()) / seconds if seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """What the report says, by name."""
        return {
            "output": str(self.output),
            "exit_reason": self.exit_reason,
            "streams": {name: run.figures() for name, run in self.streams.items()},
        }

    def report(self) -> str:
        """A line for each stream, for a person."""
        width = max(map(len, self.streams))
        lines = [f"{name:<{width}}  {run.report().partition(chr(10))[0]}" for name, run in self.streams.items()]
        return "\n".join([*lines, str(self.output / SITE)])


def adapt_streams(
    model: nn.Module,
    streams: Mapping[str, Stream],
    output: str | Path | None = None,
    *,
    method: str = "remtta",
    config: MethodConfig | None = None,
    options: RunOptions | None = None,
    delta: Delta | None = None,
    source_data: str | Path | None = None,
    health: str | Path | None = None,
    metrics: Metrics | None = None,
    on_batch: Callable[[SiteSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> SiteSummary:
    """Adapt one model to many streams, to each as if it were alone.

    Each stream's folder, `output/<name>`, is what `adapt_stream` leaves of it; `output/site.json` says how each is.
    Batches are predicted and learned from in the order in which they are full. A stream that fails, stalls or comes
    late keeps none of the others waiting.

    Args:
        model: A timm classifier, as from `load_model`; left at its source weights.
        streams: What to read, by names that can be folders'.
        output: Folder for the results; by default `runs/<UTC time>`.
        method: Name of the adaptation method, which must leave all but norms as they are.
        config: As for `adapt_stream`, for every stream.
        options: Likewise.
        delta: What each starts from.
        source_data: As for `adapt_stream`.
        health: A JSON file that is replaced every few seconds with how each run is.
        metrics: What serves the counts meanwhile.
        on_batch: Called after every batch with the counts so far; from any thread, but one at a time.
        interrupts: Turns signals into a clean stop of all.

    Returns:
        The counts of each, and the reason why it ended: of one that failed, its error.

    Raises:
        UsageError: If a folder holds another run, or the method changes more than norms.
        DeltaError: If the delta does not fit the model.
        OutputError: If results cannot be written.
    """
    options, interrupts = options or RunOptions(), interrupts or Interrupts()
    folder = default_folder() if output is None else Path(output)
    check_site(folder, streams, overwrite=options.overwrite, resume=options.resume)
    if health is not None:
        check_health_path(Path(health), folder)
    config, card = config or default_config(method, options), card_of(model)
    memory, turns = decoding_budget(options, card.preprocessing), Turns()
    plans: dict[str, Plan] = {}
    for name, stream in streams.items():
        plan = plan_run(
            model,
            card,
            stream,
            folder / name,
            method=method,
            config=config,
            options=options,
            delta=delta,
            source_data=source_data,
            wait=interrupts.check,
        )
        own = plan.adapter.method
        _check_norms_only(own, method)
        own.leave()
        config = plan.config  # with a micro-batch that is chosen once
        plans[name] = replace(plan, adapter=SharingAdapter(plan.adapter, turns, interrupts.part()), memory=memory)
    tell_plan(next(iter(plans.values())))
    site = _Site(folder, plans, turns, interrupts, on_batch)
    with contextlib.ExitStack() as during:
        during.callback(site.lock().release)
        if health is not None:
            during.enter_context(contextlib.closing(HealthFile(Path(health), site.vitals)))
        if metrics is not None:
            during.enter_context(metrics.of(site.watched))
        site.execute()
    return site.summary


def _check_norms_only(own: Method, method: str) -> None:
    """Raise UsageError if every stream would need a model of its own."""
    if not own.norms_only:
        raise UsageError(
            f"{method} changes every weight, so the streams of --streams could not share a model; run it on each "
            "source by itself, or choose a method that trains norms"
        )


class _Site:
    """The runs of many streams, a thread each, and what is told of them.

    Args:
        folder: Where their folders are.
        plans: What to run, by stream.
        turns: Where they ask for the model.
        interrupts: Stops them all.
        on_batch: Called after every batch of any.
    """

    def __init__(
        self,
        folder: Path,
        plans: Mapping[str, Plan],
        turns: Turns,
        interrupts: Interrupts,
        on_batch: Callable[[SiteSummary], None] | None,
    ) -> None:
        self._folder, self._plans, self._turns, self._interrupts = folder, plans, turns, interrupts
        self._on_batch, self._telling = on_batch, threading.Lock()
        self._runs = {
            name: Run(plan, folder / name, on_batch=lambda run: self._tell(), interrupts=interrupts.part())
            for name, plan in plans.items()
        }
        self.summary = SiteSummary(folder, {name: run.summary for name, run in self._runs.items()})

    def lock(self) -> FolderLock:
        """Have the folder, made if need be, for this process alone."""
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(self._folder)

    def execute(self) -> None:
        """Run them all to their ends; work on the model is done in this thread.

        Raises:
            OutputError: If `site.json` cannot be written at the beginning or the end.
        """
        self._write()
        threads = [
            threading.Thread(target=self._run, args=(name,), name=f"remtta-{name}", daemon=True) for name in self._runs
        ]
        with _named_messages(), self._interrupts.finishing():
            for thread in threads:
                thread.start()
            self._turns.serve(lambda: not any(thread.is_alive() for thread in threads))
            self._write()

    def _run(self, name: str) -> None:
        """One stream; whatever ends it ends nothing else."""
        _stream.set(name)
        try:
            self._runs[name].execute()
        except BaseException as error:  # which the run's summary has, and its folder, if there is one
            _log.error("%s", " ".join(str(error).split()) if isinstance(error, RemttaError) else repr(error))
            _log.debug("%s", traceback.format_exc())
        with contextlib.suppress(RemttaError):  # the last one is the one to tell
            self._turns.take(self._write, Interrupts())

    def watched(self) -> dict[str, Watched]:
        """What there is to tell of each stream, from any thread."""
        return {name: Watched(self._plans[name], run.summary, run.record) for name, run in self._runs.items()}

    def _tell(self) -> None:
        with self._telling:
            if self._on_batch:
                self._on_batch(self.summary)

    def vitals(self) -> dict[str, Any]:
        """How each stream is, at any moment and from any thread."""
        streams = {name: vitals(self._plans[name], run.summary, run.record) for name, run in self._runs.items()}
        return {"state": self.summary.exit_reason.partition(":")[0], "streams": streams}

    def _write(self) -> None:
        """Replace `site.json`.

        Raises:
            OutputError: If the disk refuses.
        """
        streams = {
            name: {"source": self._plans[name].stream.name, "kind": self._plans[name].stream.kind, **run.figures()}
            for name, run in self.summary.streams.items()
        }
        write_json(self._folder / SITE, {"exit_reason": self.summary.exit_reason, "streams": streams})


@contextlib.contextmanager
def _named_messages() -> Iterator[None]:
    """Messages of a stream's run begin with its name."""

    def name_it(record: logging.LogRecord) -> bool:
        if name := _stream.get():
            record.msg = f"{name}: {record.msg}"
        return True

    _log.addFilter(name_it)
    try:
        yield
    finally:
        _log.removeFilter(name_it)
