"""Run independent tasks on Ray workers; the only file that imports Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Generator, Sequence
from types import ModuleType
from typing import Any

from remtta.engines.processes import DIED, RETRIES, Died, R, S, T, Work, WorkersDied, warn_of_death
from remtta.errors import RemttaError, first_line, needed
from remtta.interrupts import Interrupts, Stopped

_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting
_SECONDS_TO_END = 30.0  # after they are asked to stop


def connected() -> ModuleType:
    """Return Ray, connected to the cluster at RAY_ADDRESS or to a local one; raise UsageError if Ray is missing,
    RemttaError if there is no cluster.
    """
    ray: ModuleType = needed("ray", "cluster", "--engine ray")
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or None
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            ray.init(log_to_driver=False, logging_level="error", address=address)
        except (OSError, RuntimeError, ValueError) as error:
            raise RemttaError(f"Ray cannot connect to {address or 'a local cluster'}: {first_line(error)}") from error
        if threading.current_thread() is threading.main_thread():
            for signum, handler in handlers.items():  # Ray's handlers would end the process at once
                signal.signal(signum, handler)
    return ray


def on_ray(
    work: Work[S, T, R],
    shared: S,
    tasks: Sequence[T],
    *,
    interrupts: Interrupts,
    gpus: int = 0,
    died: Died = warn_of_death,
) -> Generator[tuple[int, R]]:
    """Run tasks on the cluster at RAY_ADDRESS, or on a local one, whose machines import `work` by its name and receive
    `shared` once.

    Ray restarts tasks whose worker was lost. Otherwise as `in_processes`, except that a worker that ignores a request
    to stop is killed after half a minute.
    """
    ray = connected()
    remote = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(_call)
    shared_reference = ray.put(shared)
    waiting: dict[object, int] = {
        remote.remote(work, os.getcwd(), shared_reference, task): position for position, task in enumerate(tasks)
    }
    lost = False
    try:
        while waiting:
            with interrupts.held():
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=_SECONDS_BETWEEN_CHECKS)
                for reference in done:
                    position = waiting.pop(reference)
                    try:
                        yield position, get_result(ray, reference)
                    except WorkersDied:
                        lost = True
                        died(position, False)
        if lost:
            raise WorkersDied(DIED)
    except Stopped:
        with interrupts.deferred():
            for reference in waiting:
                ray.cancel(reference, force=False)  # raises KeyboardInterrupt in a running task
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_SECONDS_TO_END)
            for reference in done:
                position = waiting.pop(reference)
                with contextlib.suppress(Exception):  # report the signal only
                    yield position, ray.get(reference)
        raise
    finally:
        for reference in waiting:
            ray.cancel(reference, force=True)


def get_result(ray: ModuleType, reference: object) -> Any:
    """Return a task's result, or raise its error; raise WorkersDied if its worker was lost."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:  # also if its node died, or Ray killed it for lack of memory
        raise WorkersDied(DIED) from error


def _call(work: Work[S, T, R], folder: str, shared: S, task: T) -> R:
    os.chdir(folder)  # for relative paths
    with Interrupts() as received, received.deferred():
        return work(shared, task, lambda: signal.SIGTERM if received.pending else 0)
