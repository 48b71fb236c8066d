"""Tasks of worker processes run once each, whichever workers die, unless all do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from remtta.engines.cluster import get_result, on_ray
from remtta.engines.processes import DIED, RETRIES, WorkersDied, in_processes
from remtta.errors import RemttaError
from remtta.interrupts import Interrupts, Stopped
from remtta.lab.corruptions.options import CorruptOptions
from remtta.lab.corruptions.tree import corrupt_tree
from remtta.lab.evaluation.evaluating import evaluate
from remtta.lab.evaluation.options import EvalOptions
from tests.conftest import draw_image, happens, meanwhile, raising, tiny_vit
from tests.engines.until_stopped import until_stopped
from tests.lab.evaluation.trees import open_tree, write_tree


@pytest.mark.filterwarnings("ignore")  # Ray's own
@pytest.mark.parametrize("engine", ["processes", "ray"])
def test_another_worker_does_what_one_died_of_and_a_stop_lets_begun_tasks_end(engine: str, tmp_path: Path) -> None:
    def stop() -> None:
        happens(lambda: all((tmp_path / name).exists() for name in ("died", "7", "8")), within_s=300)
        os.kill(os.getpid(), signal.SIGTERM)  # in any case, or they would go on for ever

    ended: list[tuple[int, int]] = []
    with Interrupts() as interrupts:
        if engine == "ray":
            pytest.importorskip("ray", reason="needs Ray")
            done = on_ray(until_stopped, tmp_path, [7, 8], interrupts=interrupts)
        else:
            done = in_processes(until_stopped, tmp_path, [7, 8], jobs=2, interrupts=interrupts)
        with meanwhile(stop), pytest.raises(Stopped, match="SIGTERM"):
            ended.extend(done)  # as far as it comes
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
    told: list[tuple[int, bool]] = []
    how: dict[str, Any] = {"jobs": 2, "interrupts": Interrupts(), "died": lambda *death: told.append(death)}
    done = in_processes(wait_or_die, tmp_path, ["long", "short"], **how)
    assert next(done) == (0, "long")
    with pytest.raises(RemttaError, match=DIED):
        next(done)
    assert told == [(1, True)] * RETRIES + [(1, False)]
    assert (tmp_path / "long").read_text() == "begun\n"


_TASKS = """
import os
from pathlib import Path

set_by_the_main_process = False

def work(folder, number, stopped):
    if number == 0 and not Path(folder, "died").exists():
        Path(folder, "died").touch()
        os._exit(1)
    return number, set_by_the_main_process
"""
_MAIN = """
import tasks
from remtta.interrupts import Interrupts
from remtta.engines.processes import in_processes

if __name__ == "__main__":
    tasks.set_by_the_main_process = True
    print(sorted(in_processes(tasks.work, ".", [0, 1], jobs=2, interrupts=Interrupts())))
"""


def test_workers_of_a_script_are_new_processes_and_not_forked_from_one_with_threads(tmp_path: Path) -> None:
    """All other tests have theirs forked; see `tests/fork_server.py`."""
    (tmp_path / "tasks.py").write_text(_TASKS)
    (tmp_path / "main.py").write_text(_MAIN)
    done = subprocess.run([sys.executable, "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[(0, (0, False)), (1, (1, False))]\n", done.stderr
    assert "a worker process died; its work starts again" in done.stderr


def test_what_ray_kills_for_lack_of_memory_has_died() -> None:
    errors = SimpleNamespace(RayTaskError=KeyError, RayError=OSError)  # which OutOfMemoryError and others are
    ray: Any = SimpleNamespace(exceptions=errors, get=raising(OSError("killed")))
    with pytest.raises(WorkersDied, match=DIED):
        get_result(ray, None)


def test_without_ray_or_its_cluster_a_line_says_so_and_nothing_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, made, tree = tmp_path / "a.png", tmp_path / "made", open_tree(write_tree(tmp_path / "c", ["fog"]))
    draw_image(0).save(source)
    corrupt_tree(source, made, CorruptOptions(corruptions=("fog",)))
    unreachable = SimpleNamespace(is_initialized=bool, init=raising(ConnectionError("timed out")))
    lines = (None, r'pip install "ray>='), (unreachable, "Ray cannot connect to .*: timed out")
    for ray, line in lines:
        monkeypatch.setitem(sys.modules, "ray", ray)
        with pytest.raises(RemttaError, match=line):
            corrupt_tree(source, made, CorruptOptions(corruptions=("fog",), engine="ray", overwrite=True))
        with pytest.raises(RemttaError, match=line):
            evaluate(tiny_vit(), tree, tmp_path / "run", methods=["source"], options=EvalOptions(engine="ray"))
    assert len(list(made.rglob("*.png"))) == 1 and not (tmp_path / "run").exists()


_SENDS = """
import os, signal, sys, time
from remtta.interrupts import Interrupts
with Interrupts() as interrupts, interrupts.deferred():
    for name in sys.argv[1:]:
        time.sleep(0.6) if name == "later" else os.kill(os.getpid(), getattr(signal, name))
    print("still here", interrupts.pending)
"""


def after(*names: str) -> tuple[int, str]:
    command = [sys.executable, "-c", _SENDS, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip()


def test_one_signal_is_put_off_and_a_second_ends_the_process_at_once() -> None:
    assert after("SIGTERM") == (0, "still here True")
    assert after("SIGTERM", "SIGTERM", "SIGHUP") == (0, "still here True")  # one stop: to a process and its group
    assert after("SIGTERM", "later", "SIGTERM") == (-signal.SIGTERM, "")
    assert after("SIGINT", "later", "SIGTERM") == (-signal.SIGTERM, "")


def test_a_wait_that_may_never_end_is_left_also_where_stops_are_held() -> None:
    with Interrupts() as interrupts, interrupts.deferred():
        interrupts.stop_now()  # nothing came in
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped, match="SIGTERM"):
            interrupts.stop_now()
