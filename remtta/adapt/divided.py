"""Many streams divided over workers, each of which has the model for its share of them."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from remtta.adapt.planning import Setup
from remtta.adapt.site import Site, SiteSummary, StreamReport
from remtta.adapt.together import Together
from remtta.engines.interrupts import Interrupts, Stopped, Told
from remtta.engines.processes import WorkersDied, in_processes
from remtta.errors import OutputError, RemttaError, UsageError
from remtta.files import writing
from remtta.models.card import card_of
from remtta.options import RunOptions
from remtta.options.run_options import Engine
from remtta.runs.folder import RECORD
from remtta.runs.place import Place
from remtta.runs.reading import checked_record
from remtta.runs.summary import RunSummary
from remtta.streams.sources import Stream
from remtta.watching.health import HealthFile

WORKERS = ".workers"
_EVERY_S = 0.5  # workers tell how they are, and it is looked at

_log = logging.getLogger("remtta")

_Share = tuple[int, Sequence[str]]
"""A worker's number, and the names of its streams."""


@dataclass(frozen=True)
class _Common:
    """What workers have in common.

    Attributes:
        model: The classifier at its source weights, pickled.
        streams: What opens each.
        folder: Where their folders are, which all workers can write to.
        setup: How the model is adapted.
        before: Runs that were in their folders, by stream.
        threads: Of torch, in each worker.
        level: The least of a message to tell.
    """

    model: bytes
    streams: Mapping[str, Callable[[], Stream]]
    folder: Path
    setup: Setup
    before: Mapping[str, str | None]
    threads: int
    level: int

    def options_of(self, name: str) -> RunOptions:
        """Those of a stream, which may have been begun by a worker that died."""
        options = self.setup.options
        replaces = options.overwrite and _run_in(self.folder / name) == self.before[name]
        return options if replaces else replace(options, overwrite=False, resume=True)


class Divided(Site):
    """The runs of streams that are divided over workers.

    Args:
        model: At its source weights; each worker gets a copy.
        streams: What to read, by name, as `open_streams` opens it.
        folder: Where their folders are.
        setup: How the model is adapted.
        interrupts: Stops them all.
        engine: Where the workers are.
        jobs: How many there are.
        on_batch: Called now and then.

    Raises:
        UsageError: If a worker could not open a stream.
    """

    def __init__(
        self,
        model: nn.Module,
        streams: Mapping[str, Stream],
        folder: Path,
        setup: Setup,
        interrupts: Interrupts,
        *,
        engine: Engine,
        jobs: int,
        on_batch: Callable[[SiteSummary], None] | None,
    ) -> None:
        self._runs = {name: RunSummary(folder / name) for name in streams}
        super().__init__(folder, streams, self._runs)
        self._interrupts, self._engine, self._on_batch = interrupts, engine, on_batch
        jobs, names = min(jobs, len(streams)), list(streams)
        self._shares: list[_Share] = [(number, names[number::jobs]) for number in range(jobs)]
        self._common = _Common(
            pickle.dumps(model),
            {name: _opener(name, stream) for name, stream in streams.items()},
            folder,
            setup,
            {name: _run_in(folder / name) for name in streams},
            torch.get_num_threads(),
            _log.getEffectiveLevel(),
        )
        self._gpus = int(card_of(model).device.type == "cuda")
        self._reports: dict[str, StreamReport] = {}
        self._written: list[str] | None = None  # how the streams are, as `site.json` has it

    def execute(self) -> None:
        """Have workers run them all to their ends."""
        workers = self.folder / WORKERS
        shutil.rmtree(workers, ignore_errors=True)
        with writing(workers):
            workers.mkdir()
        ended: dict[str, RunSummary] = {}
        end: BaseException | None = None
        try:
            with self._watched(), contextlib.closing(self._made()) as made:
                for _, runs in made:
                    ended |= runs
        except (Stopped, WorkersDied) as error:
            end = error
        finally:
            shutil.rmtree(workers, ignore_errors=True)
        with self._interrupts.finishing():
            self._runs |= ended
            for run in self._runs.values():
                if end is not None and (run.exit_reason == "running" or run.signum is not None):
                    run.end(end)
            self.write()

    def _made(self) -> Generator[tuple[int, dict[str, RunSummary]]]:
        """What came of each worker's streams."""
        if self._engine == "ray":
            from remtta.engines.cluster import on_ray

            return on_ray(_adapt, self._common, self._shares, interrupts=self._interrupts, gpus=self._gpus)
        return in_processes(_adapt, self._common, self._shares, jobs=len(self._shares), interrupts=self._interrupts)

    def reports(self) -> dict[str, StreamReport]:
        """How each stream is, as its worker told last."""
        return {
            name: {
                **report,
                "vitals": {**report["vitals"], "state": self._runs[name].ended or report["vitals"]["state"]},
            }
            for name, report in self._reports.copy().items()
        }

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Take over what the workers tell meanwhile, and in the end."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,), name="remtta-workers", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            with self._interrupts.finishing():
                done.set()
                watcher.join()

    def _watch(self, done: threading.Event) -> None:
        messages = [_Tail(_file(self.folder, number, ".log")) for number, _ in self._shares]
        last = False
        while not last:
            last = done.wait(_EVERY_S)
            for number, _ in self._shares:
                self._reports |= _read_reports(_file(self.folder, number, ".json"))
            for tail in messages:
                tail.pass_on()
            self._runs |= {name: _unpacked(report["summary"]) for name, report in self._reports.items()}
            states = [run.exit_reason for run in self._runs.values()]
            if self._reports and states != self._written:
                with contextlib.suppress(OutputError):  # the last one is the one to tell
                    self.write()
                    self._written = states
            if self._on_batch:
                self._on_batch(self.summary)


class _Tail:
    """What a worker says, as its file grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._passed = path, 0

    def pass_on(self) -> None:
        """Say what it has said since."""
        with contextlib.suppress(OSError):  # it has said nothing yet
            with open(self._path, "rb") as file:
                file.seek(self._passed)
                lines = file.read().rpartition(b"\n")[0]
            self._passed += len(lines) + bool(lines)
            for line in lines.splitlines():
                with contextlib.suppress(ValueError):  # one that was torn when the worker died
                    level, text = json.loads(line)
                    _log.log(level, "%s", text)


class _ToFile(logging.Handler):
    """Writes down what a worker says."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        with writing(path):
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in `close`

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a disk that is full ends the runs with their own errors
            self._file.write(json.dumps([record.levelno, record.getMessage()]) + "\n")
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        super().close()


def _adapt(common: _Common, share: _Share, stopped: Callable[[], int]) -> dict[str, RunSummary]:
    """Run a worker's streams, or go on with them; none, if it was stopped before they began."""
    number, names = share
    torch.set_num_threads(common.threads)
    with _messages(_file(common.folder, number, ".log"), common.level), contextlib.suppress(Stopped):
        streams = {name: common.streams[name]() for name in names}
        site = Together(
            pickle.loads(common.model),
            streams,
            common.folder,
            common.setup,
            Told(stopped),
            on_change=lambda: None,
            options_of=common.options_of,
        )
        if number == 0:
            site.tell_plan()
        told = HealthFile(_file(common.folder, number, ".json"), lambda: {"streams": site.reports()}, _EVERY_S)
        with contextlib.closing(told):
            site.execute()
        return dict(site.summary.streams)
    return {}


@contextlib.contextmanager
def _messages(path: Path, level: int) -> Iterator[None]:
    """Write messages there."""
    handler, earlier = _ToFile(path), _log.level
    _log.addHandler(handler)
    _log.setLevel(level)
    try:
        yield
    finally:
        _log.setLevel(earlier)
        _log.removeHandler(handler)
        handler.close()


def _file(folder: Path, number: int, suffix: str) -> Path:
    """Where a worker tells how its streams are, or writes its messages."""
    return folder / WORKERS / f"{number}{suffix}"


def _opener(name: str, stream: Stream) -> Callable[[], Stream]:
    if stream.reopen is None:
        raise UsageError(f"{name} has frames that no worker could read; open it with open_streams")
    return stream.reopen


def _run_in(folder: Path) -> str | None:
    """The name of the run in a folder, if there is one."""
    try:
        return checked_record(folder / RECORD, optional={"run": str}).get("run")
    except (RemttaError, ValueError):
        return None


def _read_reports(path: Path) -> dict[str, Any]:
    """What a worker tells of its streams; nothing before it does."""
    with contextlib.suppress(OSError, ValueError):
        reports: dict[str, Any] = json.loads(path.read_bytes())["streams"]
        return reports
    return {}


def _unpacked(content: Mapping[str, Any]) -> RunSummary:
    """A summary as it was before JSON."""
    return RunSummary(**{**content, "output": Path(content["output"]), "place": Place(**content["place"])})
