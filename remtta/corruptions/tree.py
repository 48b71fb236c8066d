"""Make an ImageNet-C-like tree from a folder of images."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from remtta.corruptions.image_files import Outcome, SourceImage, corrupt_file, find_images
from remtta.corruptions.manifest import TreeManifest
from remtta.corruptions.options import CorruptOptions
from remtta.engines.cluster import connected, on_ray
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.engines.processes import in_processes
from remtta.errors import StreamError, counted
from remtta.machine import num_cores
from remtta.streams.capture import load_opencv

_CHUNKS_PER_JOB = 16  # at least, so that no process works long after the others are done
_LARGEST_CHUNK = 16  # images; handing out larger chunks saves next to nothing

_log = logging.getLogger(__name__)


@dataclass
class TreeSummary:
    """Counts of a run so far."""

    destination: Path  # root of the tree
    num_images: int  # images found
    finished: int = 0  # images finished, whether written now, kept or skipped
    written: int = 0  # files written by this run
    kept: int = 0  # files that existed already
    skipped: list[tuple[str, str]] = field(default_factory=list)  # unreadable images: path below the source, and reason
    seconds: float = 0.0  # duration so far
    signum: int | None = None  # the signal that ended the run early, if any

    @property
    def images_per_s(self) -> float:
        """Corrupted images written per second."""
        return self.written / self.seconds if self.seconds > 0 else 0.0

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of one image, which a stop may have left incomplete."""
        self.finished += outcome.complete
        self.written += outcome.written
        self.kept += outcome.kept
        if outcome.error is not None:
            self.skipped.append((outcome.name, outcome.error))

    def report(self) -> str:
        """Return the counts on one line."""
        parts = [counted(self.finished, "image"), f"{counted(self.written, 'corrupted image')} written"]
        parts += [f"{self.kept} there already"] if self.kept else []
        parts += [f"{len(self.skipped)} skipped"] if self.skipped else []
        return f"{', '.join(parts)}, {self.images_per_s:.1f} images/s; {self.destination}"

    def outcome(self) -> dict[str, object]:
        """Return the counts for corrupt.json."""
        return {
            "exit_reason": "done" if self.signum is None else signal.Signals(self.signum).name,
            "images": self.num_images,
            "finished": self.finished,
            "written": self.written,
            "kept": self.kept,
            "skipped": [{"source": name, "error": error} for name, error in self.skipped],
            "seconds": round(self.seconds, 3),
        }


def corrupt_tree(
    source: Path,
    destination: Path,
    options: CorruptOptions | None = None,
    *,
    on_image: Callable[[TreeSummary], object] = lambda summary: None,
    interrupts: Interrupts | None = None,
) -> TreeSummary:
    """Write `destination/<corruption>/<severity>/<path below source>` for every image of a folder.

    The source is a folder with or without a folder per class, or one image; by default, it gets the 15 standard
    corruptions at severity 5. Existing files are kept, so that a stopped run can continue. Unreadable images are
    skipped and listed in corrupt.json with the settings. `on_image` is called with the counts after every image. After
    a signal, files already begun are finished, and no process is left running.

    Raises:
        UsageError: If `source` does not exist or holds no images, or the destination holds something else.
        StreamError: If none of its images can be read.
        OutputError: If a file cannot be written.
        RemttaError: If OpenCV cannot be loaded, or an image cannot be corrupted for lack of memory.
    """
    options = options or CorruptOptions()
    interrupts = interrupts or Interrupts()
    images = find_images(source, destination, options.limit)
    if options.engine == "ray":
        connected()  # before anything is touched
    manifest = TreeManifest(destination, source, options)
    manifest.create()
    summary = TreeSummary(destination, len(images))
    started = time.monotonic()
    try:
        with contextlib.closing(_outcomes(images, destination, options, interrupts)) as finished:
            for outcome in finished:
                if outcome.error is not None:
                    _log.warning("skipping %s: %s", outcome.name, outcome.error)
                summary.add(outcome)
                summary.seconds = time.monotonic() - started
                on_image(summary)
    except Stopped as stop:
        summary.signum = stop.signum
    with interrupts.finishing():
        manifest.write(summary.outcome())
    if len(summary.skipped) == summary.num_images:
        name, error = summary.skipped[0]
        raise StreamError(f"no readable image ({summary.num_images} failed); the first, {name}: {error}")
    return summary


def _outcomes(
    images: Sequence[SourceImage], destination: Path, options: CorruptOptions, interrupts: Interrupts
) -> Generator[Outcome]:
    jobs = min(options.jobs or num_cores(), len(images))
    if jobs == 1 and options.engine == "processes":
        for image in images:
            with interrupts.held():
                yield corrupt_file(image, destination, options, lambda: interrupts.pending)
        return
    size = max(1, min(_LARGEST_CHUNK, len(images) // (_CHUNKS_PER_JOB * jobs)))
    chunks, shared = [images[start : start + size] for start in range(0, len(images), size)], (destination, options)
    if options.engine == "ray":
        done = on_ray(_corrupt_files, shared, chunks, interrupts=interrupts)
    else:
        done = in_processes(_corrupt_files, shared, chunks, jobs=jobs, interrupts=interrupts)
    with contextlib.closing(done):
        for _, results in done:
            yield from results


def _corrupt_files(
    shared: tuple[Path, CorruptOptions], images: Sequence[SourceImage], stopped: Callable[[], int]
) -> list[Outcome]:
    destination, options = shared
    warnings.simplefilter("ignore")  # Pillow warns of files that it reads nonetheless
    load_opencv("corrupting images").setNumThreads(1)  # the processes share the cores already
    return [corrupt_file(image, destination, options, stopped) for image in images if not stopped()]
