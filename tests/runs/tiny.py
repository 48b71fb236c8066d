"""Runs of a tiny model, and what stops them."""

import contextlib
import copy
import errno
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from torch import nn

from remtta import adapt_stream
from remtta.interrupts import Interrupts
from remtta.methods.settings.base import MethodConfig
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.table import method_config
from remtta.methods.tent import TentConfig
from remtta.options import GuardOptions, RunOptions
from remtta.runs.callbacks import BatchReport, Callback
from remtta.runs.summary import RunSummary
from remtta.streams.batches import Batches
from remtta.streams.frames import Frame
from remtta.streams.prefetch import DecodedFrame
from remtta.streams.sources import Stream
from tests.conftest import draw_image, tiny_vit
from tests.records import assert_same_results, record_of, rows_of

CONFIGS: dict[str, MethodConfig] = {
    "rem": REMConfig(lr=0.01),
    "remtta": method_config("remtta", {}, batch_size=4),
    "tent": TentConfig(lr=0.05),
    "source": method_config("source", {}, batch_size=3),
}
GUARD = GuardOptions("rollback", "both")
"""What `remtta` has by itself."""


def adapt_tiny(
    source: Any,
    folder: Path,
    method: str = "rem",
    *,
    model: nn.Module | None = None,
    resume: bool = False,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> RunSummary:
    """A run whose batches are small, and which saves after every other one."""
    run_options = RunOptions(**{"batch_size": 3, "save_every": 2, "guard": GUARD, **(options or {}), "resume": resume})
    config = more.pop("config", None) or CONFIGS[method]
    return adapt_stream(model or tiny_vit(), source, folder, method=method, config=config, options=run_options, **more)


def camera(count: int, wait: Mapping[int, Callable[[], object]] = MappingProxyType({})) -> Stream:
    """A camera that waits for something before some of its frames."""

    def frames() -> Iterator[Frame]:
        for number in range(count):
            wait.get(number, lambda: None)()
            yield Frame("camera 0", partial(draw_image, number), number, 0.1 * number)

    return Stream("0", "camera", frames())


def stop_after(batches: int, *run: Any, **more: Any) -> RunSummary:
    """`adapt_tiny` that is stopped after so many batches."""
    with Interrupts() as interrupts:
        return adapt_tiny(*run, **more, callbacks=[StopAfter(batches)], interrupts=interrupts)


def adapt_in_parts(stops: Sequence[int], *run: Any, **more: Any) -> None:
    """`adapt_tiny` that is stopped after so many batches, goes on, is stopped again, and in the end comes through."""
    for batches in stops:
        stop_after(batches, *run, **more, resume=True)
    adapt_tiny(*run, **more, resume=True)


def assert_goes_on(model: nn.Module, source: Any, folder: Path, **more: Any) -> None:
    """A run that was stopped after a batch ends as one that was not, each on its own copy of the model."""
    adapt_tiny(source, folder / "through", model=copy.deepcopy(model), **more)
    stopped = stop_after(1, source, folder / "run", model=copy.deepcopy(model), **more)
    assert stopped.num_frames < len(rows_of(folder / "through")) and stopped.exit_reason == "SIGTERM"
    resumed = adapt_tiny(source, folder / "run", model=copy.deepcopy(model), resume=True, **more)
    assert resumed.exit_reason == "completed" and record_of(folder / "run")["resumed"] == 1
    assert_same_results(folder / "run", folder / "through")


def made_run(frames: Path, folder: Path, name: str = "whole") -> Path:
    """A copy of one of the runs that the fixture `made` has on these frames."""
    return Path(shutil.copytree(frames.parent / name, folder))


def received_frames(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which runs append the index of every frame that they have received for a batch."""
    received: list[int] = []
    decode = Batches.decoded

    def decoded(*args: Any, **more: Any) -> Generator[DecodedFrame]:
        with contextlib.closing(decode(*args, **more)) as frames:
            for frame in frames:
                yield frame
                received.append(frame.index)

    monkeypatch.setattr(Batches, "decoded", decoded)
    return received


def fill_disk(monkeypatch: pytest.MonkeyPatch, room: int, look: Callable[[], object] = int) -> None:
    """Fill the disk after so many more bytes; `look` is called before each write."""
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        nonlocal room
        look()
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(room, len(data))
        room -= taken
        return write(descriptor, data[:taken])

    monkeypatch.setattr(os, "write", full)


class Each(Callback):
    """Calls a function with the counts after every batch."""

    def __init__(self, function: Callable[[RunSummary], object]) -> None:
        self._function = function

    def on_batch(self, report: BatchReport) -> None:
        self._function(report.summary)


class StopAfter(Callback):
    """Sends SIGTERM after so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_batch(self, report: BatchReport) -> None:
        self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
