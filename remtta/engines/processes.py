"""Independent tasks handed out to worker processes, here or on a cluster; a worker that dies costs only what it had."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import RemttaError

RETRIES = 2
"""Times that tasks are begun again whose worker died."""

DIED = (
    "a worker process died, perhaps for lack of memory; every file written is whole: run the same command again, "
    "with a smaller --jobs"
)
START = "spawn"
"""How processes begin: fresh, as forks of one with threads (the progress bar's, OpenCV's) may hang."""

_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")
Work = Callable[[S, T, Callable[[], bool]], R]
"""What is done with what all tasks share, and one of them; it ends early once told, by the function, to stop."""

_log = logging.getLogger("remtta")
_stop: Event | None = None  # in a worker: set when it is to end early
_shared: Any = None  # in a worker: what all tasks share


def num_jobs(wanted: int | None) -> int:
    """As many processes as wanted, or as there are cores for this process."""
    if wanted is not None:
        return wanted
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    work: Work[S, T, R], shared: S, tasks: Sequence[T], *, jobs: int, interrupts: Interrupts
) -> Generator[tuple[int, R]]:
    """Have tasks done by processes of this machine.

    Args:
        work: What to do; importable by its name.
        shared: What it takes for all tasks, sent to each process once.
        tasks: What it takes for each.
        jobs: How many processes.
        interrupts: Where a signal to stop is noticed.

    Returns:
        Positions of tasks and what came of them, as they are finished.

    Raises:
        RemttaError: If workers die again and again, or what the work raises.
        Stopped: On a signal, once no process is left, after what the tasks begun came to.
    """
    context: Any = multiprocessing.get_context(START)
    with _signals_blocked():  # the event brings a process of multiprocessing's own
        stop = context.Event()
    left, deaths = dict(enumerate(tasks)), 0
    while left:
        pool = ProcessPoolExecutor(min(jobs, len(left)), context, initializer=_start, initargs=(stop, shared))
        try:
            for position, result in _done(pool, work, dict(left), stop, 2 * jobs, interrupts):
                del left[position]
                yield position, result
        except BrokenProcessPool as error:
            deaths += 1
            if deaths > RETRIES:
                raise RemttaError(DIED) from error
            _log.warning("a worker process died; what it had is begun again")
        except BaseException:
            stop.set()
            raise
        finally:
            with interrupts.finishing():
                pool.shutdown(cancel_futures=True)


def _done(
    pool: ProcessPoolExecutor,
    work: Work[S, T, R],
    tasks: dict[int, T],
    stop: Event,
    most: int,
    interrupts: Interrupts,
) -> Iterator[tuple[int, R]]:
    """What a pool has done, with so many tasks handed out at a time."""
    todo, waiting = iter(tasks.items()), dict[Future[R], int]()
    try:
        while True:
            with interrupts.held():
                for position, task in islice(todo, most - len(waiting)):
                    with _signals_blocked():
                        waiting[pool.submit(_call, work, task)] = position
                if not waiting:
                    return
                done, _ = wait(waiting, timeout=_SECONDS_BETWEEN_CHECKS, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
    except Stopped:
        with interrupts.finishing():
            stop.set()
            yield from _last(waiting)
        raise


def _last(waiting: dict[Future[R], int]) -> Iterator[tuple[int, R]]:
    """What was still done when the processes were told to end."""
    begun = {future: position for future, position in waiting.items() if not future.cancel()}
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


def _start(stop: Event, shared: Any) -> None:
    """Set up a worker process."""
    global _stop, _shared
    _stop, _shared = stop, shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process if the first one is killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _call(work: Work[Any, T, R], task: T) -> R:
    stop = _stop
    assert stop is not None
    return work(_shared, task, stop.is_set)
