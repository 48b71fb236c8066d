"""Images handed out to processes, so that a signal, a full disk or a dying process ends them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from remtta.corruptions.options import CorruptOptions
from remtta.corruptions.sources import SourceImage
from remtta.corruptions.worker import Outcome, corrupt_file
from remtta.engines.interrupts import Interrupts
from remtta.engines.processes import in_processes, num_jobs
from remtta.streams.opencv import load_opencv

_CHUNKS_PER_JOB = 16  # at the least; so that none works long after the others are done
_LARGEST_CHUNK = 16  # images; beyond it, handing them out costs next to nothing


def outcomes(
    images: Sequence[SourceImage], destination: Path, options: CorruptOptions, interrupts: Interrupts
) -> Generator[Outcome]:
    """Corrupt all images; what became of each, as they are finished.

    Raises:
        OutputError, RemttaError: As `corrupt_file`, or if processes die again and again.
        UsageError: If there is no Ray.
        Stopped: On a signal, once no process is left and every file begun is written.
    """
    jobs = min(num_jobs(options.jobs), len(images))
    if jobs == 1 and options.engine == "processes":
        for image in images:
            with interrupts.held():
                yield corrupt_file(image, destination, options, lambda: interrupts.pending)
        return
    chunks, shared = list(_chunks(images, jobs)), (destination, options)
    if options.engine == "ray":
        from remtta.engines.cluster import on_ray

        done = on_ray(_corrupt_files, shared, chunks, interrupts=interrupts)
    else:
        done = in_processes(_corrupt_files, shared, chunks, jobs=jobs, interrupts=interrupts)
    with closing(done):
        for _, results in done:
            yield from results


def _chunks(images: Sequence[SourceImage], jobs: int) -> Iterator[Sequence[SourceImage]]:
    size = max(1, min(_LARGEST_CHUNK, len(images) // (_CHUNKS_PER_JOB * jobs)))
    return (images[start : start + size] for start in range(0, len(images), size))


def _corrupt_files(
    shared: tuple[Path, CorruptOptions], images: Sequence[SourceImage], stopped: Callable[[], int]
) -> list[Outcome]:
    destination, options = shared
    warnings.simplefilter("ignore")  # Pillow's, about files that it reads all the same
    load_opencv("corrupting images").setNumThreads(1)  # the processes share the cores already
    return [corrupt_file(image, destination, options, stopped) for image in images if not stopped()]
