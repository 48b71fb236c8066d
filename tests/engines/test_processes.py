"""Tasks of worker processes run once each, whichever workers die, unless all do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from remtta.engines.cluster import on_ray
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.engines.processes import DIED, RETRIES, in_processes
from remtta.errors import RemttaError, UsageError


def square(died: Path, number: int, stopped: Callable[[], int]) -> int:
    """Return the square; die on the first call with 3."""
    if number == 3 and not died.exists():
        died.touch()
        os._exit(1)
    return number * number


def die(shared: None, number: int, stopped: Callable[[], int]) -> None:
    os._exit(1)


def test_tasks_of_a_worker_that_died_are_done_by_another(tmp_path: Path) -> None:
    done = in_processes(square, tmp_path / "died", range(5), jobs=1, interrupts=Interrupts())
    assert sorted(done) == [(0, 0), (1, 1), (2, 4), (3, 9), (4, 16)]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_has_another_worker_do_what_one_died_of(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: remtta[cluster]")
    done = on_ray(square, tmp_path / "died", range(5), interrupts=Interrupts())
    assert sorted(done) == [(0, 0), (1, 1), (2, 4), (3, 9), (4, 16)]
    assert (tmp_path / "died").exists()


def until_stopped(folder: Path, number: int, stopped: Callable[[], int]) -> int:
    """Run until asked to stop."""
    (folder / str(number)).touch()
    while not stopped():
        time.sleep(0.05)
    return number


def stop_them(done: Generator[tuple[int, int]], folder: Path) -> list[tuple[int, int]]:
    """Return the results of tasks that were interrupted by a signal."""

    def send() -> None:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    ended: list[tuple[int, int]] = []
    with pytest.raises(Stopped, match="SIGTERM"):
        ended.extend(done)  # as far as it comes
    return ended


def test_a_stop_lets_the_tasks_that_were_begun_end_by_themselves(tmp_path: Path) -> None:
    with Interrupts() as interrupts:
        ended = stop_them(in_processes(until_stopped, tmp_path, [7, 8], jobs=2, interrupts=interrupts), tmp_path)
    assert sorted(ended) == [(0, 7), (1, 8)]


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_stop_lets_the_tasks_of_ray_end_by_themselves(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs Ray: remtta[cluster]")
    with Interrupts() as interrupts:
        ended = stop_them(on_ray(until_stopped, tmp_path, [7, 8], interrupts=interrupts), tmp_path)
    assert sorted(ended) == [(0, 7), (1, 8)]


def wait_or_die(folder: Path, name: str, stopped: Callable[[], int]) -> str:
    """Die at once, except for "long", which runs until the other has died often enough."""
    with (folder / name).open("a") as file:
        file.write("begun\n")
    if name != "long":
        os._exit(1)
    other = folder / "short"
    while not other.exists() or other.read_text().count("\n") <= RETRIES:
        time.sleep(0.05)
    return name


def test_tasks_that_every_worker_dies_of_end_it_with_advice_once_the_others_are_done(tmp_path: Path) -> None:
    done = in_processes(wait_or_die, tmp_path, ["long", "short"], jobs=2, interrupts=Interrupts())
    assert next(done) == (0, "long")
    with pytest.raises(RemttaError, match=DIED):
        next(done)
    assert (tmp_path / "long").read_text() == "begun\n"


def test_without_ray_the_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install \"remtta\[cluster\]\""):
        next(on_ray(die, None, [0], interrupts=Interrupts()))
