"""Independent tasks handed out to worker processes, here or on a cluster; a worker that dies costs only what it had."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import RemttaError

RETRIES = 2
"""Times that a task is begun again whose worker died."""

DIED = (
    "a worker process died, perhaps out of memory; all files written are complete, so run the same command again "
    "with a smaller --jobs"
)


class WorkersDied(RemttaError):
    """Whoever took on some task died of it."""


START = "spawn"
"""How processes begin: fresh, as forks of one with threads (the progress bar's, OpenCV's) may hang."""

_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[S, T, Callable[[], int]], R]
"""What is done with what all tasks share, and one of them; a function returns a signal's number once it is to stop."""

_log = logging.getLogger("remtta")
_stop: Any = None  # in a worker: the number of the signal that it is to end early by, or 0


def num_jobs(wanted: int | None) -> int:
    """As many processes as wanted, or as there are cores for this process."""
    if wanted is not None:
        return wanted
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    work: Work[S, T, R], shared: S, tasks: Sequence[T], *, jobs: int, interrupts: Interrupts
) -> Generator[tuple[int, R]]:
    """Have tasks done by processes of this machine. One that dies costs only the task it had, which is begun again.

    Args:
        work: What to do; importable by its name.
        shared: What it takes for all tasks.
        tasks: What it takes for each.
        jobs: How many processes.
        interrupts: Where a signal to stop is noticed.

    Returns:
        Positions of tasks and what came of them, as they are finished.

    Raises:
        WorkersDied: If every process that took on a task died of it; once the others are done.
        RemttaError: What the work raises.
        Stopped: On a signal, once no process is left, after what the tasks begun came to.
    """
    context: Any = multiprocessing.get_context(START)
    stop = context.RawValue("i", 0)  # without a lock, which a process that is killed could hold for ever
    idle = [_Worker(context, stop) for _ in range(min(jobs, len(tasks)))]
    workers, todo, deaths = tuple(idle), deque(range(len(tasks))), Counter[int]()
    busy: dict[Future[R], tuple[_Worker, int]] = {}
    try:
        while todo or busy:
            with interrupts.held():
                while todo and idle:
                    worker, position = idle.pop(), todo.popleft()
                    busy[worker.begin(work, shared, tasks[position])] = worker, position
                done, _ = wait(busy, timeout=_SECONDS_BETWEEN_CHECKS, return_when=FIRST_COMPLETED)
                for future in done:
                    worker, position = busy.pop(future)
                    idle.append(worker)
                    if not isinstance(future.exception(), BrokenProcessPool):
                        yield position, future.result()
                        continue
                    worker.end()
                    deaths[position] += 1
                    if deaths[position] <= RETRIES:
                        _log.warning("a worker process died; its work starts again")
                        todo.append(position)
        if max(deaths.values(), default=0) > RETRIES:
            raise WorkersDied(DIED)
    except Stopped as signalled:
        with interrupts.finishing():
            stop.value = signalled.signum
            yield from _last({future: position for future, (_, position) in busy.items()})
        raise
    except BaseException:
        stop.value = signal.SIGTERM
        raise
    finally:
        with interrupts.finishing():
            for worker in workers:
                worker.end()


class _Worker:
    """A process that does one task at a time, and is followed by another when it has died."""

    def __init__(self, context: Any, stop: Any) -> None:
        self._context, self._stop = context, stop
        self._process: ProcessPoolExecutor | None = None

    def begin(self, work: Work[S, T, R], shared: S, task: T) -> Future[R]:
        """Hand it a task."""
        if self._process is None:
            # What is shared comes with a task: handing a process much at its start waits for ever if it is killed then.
            self._process = ProcessPoolExecutor(1, self._context, initializer=_start, initargs=(self._stop,))
        try:
            with _signals_blocked():  # the process, which this starts, has them blocked, too
                return self._process.submit(_call, work, shared, task)
        except BrokenProcessPool:  # it died between two tasks
            self.end()
            return self.begin(work, shared, task)

    def end(self) -> None:
        """Wait until it has done its task, if it lives, and let go of it."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None


def _last(begun: dict[Future[R], int]) -> Iterator[tuple[int, R]]:
    """What was still done when the processes were told to end."""
    wait(begun)
    for future, position in begun.items():
        if future.exception() is None:  # else the signal is the first reason to end
            yield position, future.result()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Have processes that are started now never see a signal: they end when the first process tells them to.

    A terminal's Ctrl-C goes to all of them, and would interrupt their files.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows; there `_start` ignores Ctrl-C, a little later
        yield
        return
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _start(stop: Any) -> None:
    """Set up a worker process."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process if the first one is killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(work: Work[S, T, R], shared: S, task: T) -> R:
    stop = _stop
    return work(shared, task, lambda: int(stop.value))
