"""Images handed out to processes, so that a signal, a full disk or a dying process ends them all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.synchronize import Event
from pathlib import Path

from remtta.corruptions.options import CorruptOptions
from remtta.corruptions.sources import SourceImage
from remtta.corruptions.worker import Outcome, corrupt_file
from remtta.errors import RemttaError
from remtta.runs.interrupts import Interrupts, Stopped
from remtta.streams.opencv import load_opencv

_CHUNKS_PER_JOB = 16  # at the least; so that none works long after the others are done
_LARGEST_CHUNK = 16  # images; beyond it, handing them out costs next to nothing
_SECONDS_BETWEEN_CHECKS = 0.2  # for signals, while waiting

_stop: Event | None = None  # in a worker: set when it is to end early


def num_jobs(wanted: int | None) -> int:
    """As many processes as wanted, or as there are cores for this process."""
    if wanted is not None:
        return wanted
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcomes(
    images: Sequence[SourceImage], destination: Path, options: CorruptOptions, interrupts: Interrupts
) -> Generator[Outcome]:
    """Corrupt all images; what became of each, as they are finished.

    Raises:
        OutputError, RemttaError: As `corrupt_file`, or if a process dies.
        Stopped: On a signal, once no process is left and every file begun is written.
    """
    jobs = min(num_jobs(options.jobs), len(images))
    if jobs > 1:
        yield from _in_parallel(images, destination, options, interrupts, jobs)
        return
    for image in images:
        with interrupts.held():
            yield corrupt_file(image, destination, options, lambda: interrupts.pending)


def _in_parallel(
    images: Sequence[SourceImage], destination: Path, options: CorruptOptions, interrupts: Interrupts, jobs: int
) -> Generator[Outcome]:
    # Fresh processes: forks of one with threads (the progress bar's, OpenCV's) may hang.
    context = multiprocessing.get_context("spawn")
    with _signals_blocked():  # the event brings a process of multiprocessing's own
        stop = context.Event()
    chunks = _chunks(images, jobs)
    waiting: set[Future[list[Outcome]]] = set()
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(stop,))
    try:
        while True:
            with interrupts.held(), _named_death():
                for chunk in islice(chunks, 2 * jobs - len(waiting)):
                    with _signals_blocked():
                        waiting.add(pool.submit(_corrupt_files, chunk, destination, options))
                if not waiting:
                    return
                done, waiting = wait(waiting, timeout=_SECONDS_BETWEEN_CHECKS, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
    except Stopped:
        with interrupts.finishing():
            stop.set()
            yield from _last(waiting)
        raise
    finally:
        with interrupts.finishing():
            stop.set()
            pool.shutdown(cancel_futures=True)


def _last(waiting: set[Future[list[Outcome]]]) -> Iterator[Outcome]:
    """What was still done when the processes were told to end."""
    begun = [future for future in waiting if not future.cancel()]
    wait(begun)
    for future in begun:
        if future.exception() is None:  # else the signal is the first reason to end
            yield from future.result()


def _chunks(images: Sequence[SourceImage], jobs: int) -> Iterator[Sequence[SourceImage]]:
    size = max(1, min(_LARGEST_CHUNK, len(images) // (_CHUNKS_PER_JOB * jobs)))
    return (images[start : start + size] for start in range(0, len(images), size))


@contextlib.contextmanager
def _named_death() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise RemttaError(
            "a worker process died, perhaps for lack of memory; every file written is whole: "
            "run the same command again, with a smaller --jobs"
        ) from error


@contextlib.contextmanager
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


def _start(stop: Event) -> None:
    """Set up a worker process."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")  # Pillow's, about files that it reads all the same
    load_opencv("corrupting images").setNumThreads(1)  # the processes share the cores already


def _end_with_parent() -> None:
    """End this process if the first one is killed: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _corrupt_files(images: Sequence[SourceImage], destination: Path, options: CorruptOptions) -> list[Outcome]:
    stop = _stop
    assert stop is not None
    return [corrupt_file(image, destination, options, stop.is_set) for image in images if not stop.is_set()]
