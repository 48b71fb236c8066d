"""Run independent tasks in worker processes; if a worker dies, only its current task is lost and restarted."""

from __future__ import annotations

import ctypes
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
from multiprocessing.context import BaseContext
from typing import TypeVar

from remtta.errors import RemttaError
from remtta.interrupts import Interrupts, Stopped

RETRIES = 2
"""Number of times a task is restarted if its worker dies."""

DIED = (
    "a worker process died, perhaps out of memory; all files written are complete: run the command again with a "
    "smaller --jobs, and adapt and eval with --resume"
)


class WorkersDied(RemttaError):
    """Every worker that ran some task died."""


START = "spawn"
"""Start method: a fresh process, since forking one with threads (of the progress bar or OpenCV) may hang."""

_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[S, T, Callable[[], int]], R]
"""A function of the data shared by all tasks, a task, and a function that returns a signal number once the task should
stop, else 0.
"""

Died = Callable[[int, bool], None]
"""Receives the position of a task whose worker died, and whether the task is restarted."""

_log = logging.getLogger(__name__)
_stop = ctypes.c_int()  # in a worker, shared with the main process: the number of the signal to stop by, or 0


def warn_of_death(position: int, restarts: bool) -> None:
    """Warn that the worker of a task died, if the task is restarted; otherwise `WorkersDied` is raised at the end."""
    if restarts:
        _log.warning("a worker process died; its work starts again")


def in_processes(
    work: Work[S, T, R],
    shared: S,
    tasks: Sequence[T],
    *,
    jobs: int,
    interrupts: Interrupts,
    died: Died = warn_of_death,
) -> Generator[tuple[int, R]]:
    """Run tasks in processes, which import `work` by its name; if one dies, its task is restarted, and `died` called.

    Yields:
        Position and result of each task as it finishes.

    Raises:
        WorkersDied: If every process that ran some task died; raised after the other tasks finished.
        RemttaError: Whatever `work` raises.
        Stopped: On a signal, after yielding the results of tasks already begun; no process is left running.
    """
    context = multiprocessing.get_context(START)
    stop = context.RawValue(ctypes.c_int, 0)  # without a lock, which a killed process could hold forever
    idle = [_Worker(context, stop) for _ in range(min(jobs, len(tasks)))]
    workers, queue, deaths = tuple(idle), deque(range(len(tasks))), Counter[int]()
    busy: dict[Future[R], tuple[_Worker, int]] = {}
    try:
        while queue or busy:
            with interrupts.held():
                while queue and idle:
                    worker, position = idle.pop(), queue.popleft()
                    busy[worker.submit(work, shared, tasks[position])] = worker, position
                done, _ = wait(busy, timeout=_SECONDS_BETWEEN_CHECKS, return_when=FIRST_COMPLETED)
                for future in done:
                    worker, position = busy.pop(future)
                    idle.append(worker)
                    if not isinstance(future.exception(), BrokenProcessPool):
                        yield position, future.result()
                        continue
                    worker.shutdown()
                    deaths[position] += 1
                    if restarts := deaths[position] <= RETRIES:
                        queue.append(position)
                    died(position, restarts)
        if max(deaths.values(), default=0) > RETRIES:
            raise WorkersDied(DIED)
    except Stopped as signalled:
        with interrupts.deferred():
            stop.value = signalled.signum
            wait(busy)
            for future, (_, position) in busy.items():
                if future.exception() is None:  # otherwise report the signal only
                    yield position, future.result()
        raise
    except BaseException:
        stop.value = signal.SIGTERM
        raise
    finally:
        with interrupts.deferred():
            for worker in workers:
                worker.shutdown()


class _Worker:
    """A process that runs one task at a time, and is replaced if it dies."""

    def __init__(self, context: BaseContext, stop: ctypes.c_int) -> None:
        self._context, self._stop = context, stop
        self._process: ProcessPoolExecutor | None = None

    def submit(self, work: Work[S, T, R], shared: S, task: T) -> Future[R]:
        if self._process is None:
            # `shared` is sent with the task: sending much data at a process's start hangs forever if it is killed then.
            self._process = ProcessPoolExecutor(1, self._context, initializer=_start, initargs=(self._stop,))
        try:
            with _signals_blocked():  # the process started here inherits the blocked signals
                return self._process.submit(_call, work, shared, task)
        except BrokenProcessPool:  # it died between two tasks
            self.shutdown()
            return self.submit(work, shared, task)

    def shutdown(self) -> None:
        """Wait for the current task, if any, and end the process."""
        if self._process is not None:
            self._process.shutdown()
            self._process = None


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals in processes started in this block, since Ctrl-C in a terminal signals every process and would
    interrupt their writing of files; the main process stops them instead.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows: `_start` ignores Ctrl-C instead, slightly later
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _start(stop: ctypes.c_int) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent process is killed; otherwise this one would run forever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _call(work: Work[S, T, R], shared: S, task: T) -> R:
    return work(shared, task, lambda: _stop.value)
