"""Make an ImageNet-C-like tree from a folder of images."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remtta._version import __version__
from remtta.engines.cluster import connected, on_ray
from remtta.engines.processes import in_processes
from remtta.errors import StreamError, UsageError, counted
from remtta.files import MANIFEST, check_can_hold, from_json, remove_leftovers, write_json, writing
from remtta.interrupts import Interrupts, Stopped
from remtta.lab.corruptions.image_files import Outcome, SourceImage, corrupt_file, find_images
from remtta.lab.corruptions.options import JPEG_QUALITY, CorruptOptions, in_standard_order
from remtta.lab.corruptions.parameters import CORRUPTIONS, PARAMETERS, SEVERITIES, parts_of
from remtta.machine import num_cores
from remtta.streams.capture import load_opencv

GENERATOR = 1
"""Incremented whenever the same seed and settings produce different images."""

_LEFTOVER_AFTER_S = 60.0
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
    settings = _prepare(destination, source, options)
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
    with interrupts.deferred():
        _write_manifest(destination, options, settings, summary.outcome())
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


# --- corrupt.json: source and settings of a tree, by which a run resumes it and refuses to mix in other images --------


def _prepare(destination: Path, source: Path, options: CorruptOptions) -> dict[str, object]:
    """Prepare the root of a tree, write its manifest, and return the settings in it. Raise UsageError if the folder
    holds a tree with other settings, or corruptions that remtta did not make; OutputError if it cannot be written to.
    """
    settings: dict[str, object] = {
        "source": os.path.realpath(source),
        "seed": options.seed,
        "size": options.size,
        "parameters": options.parameters,
        "format": options.format,
        "jpeg_quality": JPEG_QUALITY,
        "generator": GENERATOR,
    }
    check_can_hold(destination, "a folder", "DST")
    earlier = _read(destination)
    if earlier is not None and options.overwrite:
        _remove_tree(destination, _severities_in(earlier))
        earlier = None
    if earlier is None:
        for name in options.corruptions:
            if os.path.lexists(folder := destination / name):
                raise UsageError(f"{folder} exists, but no {MANIFEST} says how it was made; choose another DST")
    else:
        for name, value in settings.items():
            if (before := earlier["settings"].get(name)) != value:
                shown, now = ("none" if setting is None else setting for setting in (before, value))
                raise UsageError(
                    f"{destination} was made with {name} {shown}, not {now}; choose another DST, "
                    "or replace it with --overwrite"
                )
        _remove_leftovers(destination, _severities_in(earlier))
    with writing(destination):
        destination.mkdir(parents=True, exist_ok=True)
    _write_manifest(destination, options, settings, {"exit_reason": "unfinished"})
    return settings


def _write_manifest(
    destination: Path, options: CorruptOptions, settings: Mapping[str, object], outcome: Mapping[str, object]
) -> None:
    """Write the manifest with the outcome of the run, and with what other runs have added to the tree."""
    current = _read(destination)
    severities = {} if current is None else _severities_in(current)
    for name in options.corruptions:
        severities[name] = sorted({*severities.get(name, ()), *options.severities})
    content = {
        "remtta": __version__,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "corruptions": {
            name: {"severities": severities[name], **_parameters(name)} for name in in_standard_order(severities)
        },
        "limit": options.limit,
        **outcome,
    }
    write_json(destination / MANIFEST, content)


def _parameters(name: str) -> dict[str, object]:
    if name not in PARAMETERS:
        return {part: _parameters(part) for part in parts_of(name)}
    values = PARAMETERS[name].values
    return {chosen: [values(severity, chosen) for severity in SEVERITIES] for chosen in ("imagenet", "cifar")}


def _read(destination: Path) -> Mapping[str, Any] | None:
    path = destination / MANIFEST
    try:
        manifest: Mapping[str, Any] = from_json(path.read_text(encoding="utf-8"))
        _severities_in(manifest)
        if not isinstance(manifest["settings"], dict):
            raise TypeError("settings are no object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read as a record of remtta corrupt; choose another DST") from error
    return manifest


def _severities_in(manifest: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return severities by corruption, without unknown ones: folders are removed by what this returns."""
    return {
        name: [severity for severity in SEVERITIES if severity in entry["severities"]]
        for name, entry in manifest["corruptions"].items()
        if set(parts_of(name)) <= set(CORRUPTIONS)
    }


def _remove_tree(destination: Path, severities: Mapping[str, Sequence[int]]) -> None:
    with writing(destination):
        for name in severities:
            for severity in severities[name]:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(destination / name / str(severity))
            with contextlib.suppress(OSError):  # keep a folder that holds other files
                (destination / name).rmdir()
        (destination / MANIFEST).unlink()


def _remove_leftovers(destination: Path, severities: Mapping[str, Sequence[int]]) -> None:
    """Remove a killed run's temporary files, unless recent: another run may be adding to the same tree."""
    remove_leftovers(destination, (MANIFEST,), untouched_for_s=_LEFTOVER_AFTER_S)
    for name in severities:
        for severity in severities[name]:
            for folder, _, _ in os.walk(destination / name / str(severity)):
                remove_leftovers(Path(folder), ("*.JPEG", "*.png"), untouched_for_s=_LEFTOVER_AFTER_S)
