"""Independent tasks on the workers of Ray: the only file that knows it."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

from remtta.engines.interrupts import Interrupts
from remtta.engines.processes import DIED, RETRIES, R, S, T, Work
from remtta.errors import RemttaError, UsageError

_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting


def on_ray(
    work: Work[S, T, R], shared: S, tasks: Sequence[T], *, interrupts: Interrupts, gpus: int = 0
) -> Generator[tuple[int, R]]:
    """Have tasks done by the cluster that RAY_ADDRESS names, or by one of this machine alone.

    Tasks whose worker is lost are begun again by Ray. All else is as in `in_processes`, but for a stop, which ends
    them at once.

    Args:
        work: What to do; importable by its name on every machine.
        shared: What it takes for all tasks, sent to each machine once.
        tasks: What it takes for each.
        interrupts: Where a signal to stop is noticed.
        gpus: How many each task needs.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error", address=os.environ.get("RAY_ADDRESS"))
    remote = ray.remote(max_retries=RETRIES, num_cpus=1, num_gpus=gpus)(_call)
    everything = ray.put(shared)
    waiting = {remote.remote(work, os.getcwd(), everything, task): position for position, task in enumerate(tasks)}
    try:
        while waiting:
            with interrupts.held():
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=_SECONDS_BETWEEN_CHECKS)
                for each in done:
                    yield waiting.pop(each), _result(ray, each)
    finally:
        for each in waiting:
            ray.cancel(each, force=True)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UsageError('--engine ray needs Ray: pip install "remtta[cluster]"') from error
    return ray


def _result(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.WorkerCrashedError as error:
        raise RemttaError(DIED) from error


def _call(work: Work[Any, T, R], folder: str, shared: Any, task: T) -> R:
    os.chdir(folder)  # for relative paths
    return work(shared, task, lambda: False)
