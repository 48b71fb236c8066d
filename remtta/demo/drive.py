"""The demo: an embedded road-sign classifier on a drive into bad weather, adapted through the usual code path."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.adapt.one_stream import adapt_stream
from remtta.demo.signs import CONDITIONS, render_sign
from remtta.engines.interrupts import Interrupts, Stopped
from remtta.errors import UsageError
from remtta.files import writing
from remtta.models.embedded import CLASS_NAMES, EMBEDDED
from remtta.models.loading import load_model
from remtta.options import RunOptions
from remtta.runs.folder import PREDICTIONS, check_folder
from remtta.runs.reading import read_rows
from remtta.runs.summary import RunSummary

BATCH_SIZE = 20
METHODS = ("source", "remtta")
FRAMES, LABELLED, PICTURE = "frames", "labelled", "demo.png"
WINDOW = 80
"""Number of frames over which the picture's curve is averaged."""

_STREAM_SEED = 77  # separates the drive from the training images, which are seeded with a single number

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriveFrame:
    """A labelled frame of the drive."""

    path: Path
    condition: str
    label: int


@dataclass(frozen=True)
class DemoResult:
    """The demo's results."""

    frames: Sequence[DriveFrame]  # the drive, in order
    wrong: Mapping[str, Sequence[bool]]  # method name to one bool per frame: whether its prediction was wrong
    output: Path  # folder of everything the demo wrote

    def errors(self, method: str) -> dict[str, float]:
        """Return the error in percent per condition, and their mean."""
        outcomes = zip(self.frames, self.wrong[method], strict=True)
        errors = {}
        for condition, group in groupby(outcomes, key=lambda outcome: outcome[0].condition):
            wrong = [is_wrong for _, is_wrong in group]
            errors[condition] = 100 * sum(wrong) / len(wrong)
        return {**errors, "mean": sum(errors.values()) / len(errors)}

    def table(self) -> str:
        """Return the errors as text, one line per condition."""
        columns = {method: self.errors(method) for method in self.wrong}
        header = f"{'error in %':<12}" + "".join(f"{method:>9}" for method in columns)
        names = list(next(iter(columns.values())))
        rows = [f"{name:<12}" + "".join(f"{errors[name]:9.1f}" for errors in columns.values()) for name in names]
        return "\n".join([header, *rows])


def run_demo(
    output: Path,
    *,
    frames_per_condition: int = 200,
    seed: int = 0,
    overwrite: bool = False,
    on_batch: Callable[[RunSummary], None] | None = None,
    interrupts: Interrupts | None = None,
) -> DemoResult:
    """Run the embedded model through every condition, without and with adaptation.

    Writes the frames, the same frames in a labelled tree for `remtta eval`, a run folder per method, and the plot
    `demo.png`; `on_batch` is called after every batch with the counts of the current method's run. Raise UsageError if
    the folder is not empty and may not be overwritten; OutputError if results cannot be written.
    """
    from remtta.demo.picture import draw_picture

    _clear_folder(output, overwrite)
    if frames_per_condition < WINDOW:
        text = (
            "%d frames of each condition are few for the picture, whose curve is a mean over %d; take --frames %d or "
        )
        _log.warning(text + "more", frames_per_condition, WINDOW, 2 * WINDOW)
    _log.info("drawing %d frames under %d conditions", frames_per_condition * len(CONDITIONS), len(CONDITIONS))
    with writing(output / FRAMES):
        frames = draw_drive(output, frames_per_condition, seed)
        label_drive(output, frames)
    wrong = {}
    for method in METHODS:
        _log.info("running %s", "the source model" if method == "source" else method)
        summary = adapt_stream(
            load_model(EMBEDDED),
            output / FRAMES,
            output / method,
            method=method,
            options=RunOptions(batch_size=BATCH_SIZE, overwrite=overwrite),
            on_batch=on_batch,
            interrupts=interrupts,
        )
        if summary.signum is not None:
            raise Stopped(summary.signum)
        rows = read_rows(output / method / PREDICTIONS)
        wrong[method] = [row["class"] != frame.label for row, frame in zip(rows, frames, strict=True)]
    result = DemoResult(frames, wrong, output)
    draw_picture(result)
    return result


def _clear_folder(output: Path, overwrite: bool) -> None:
    if (output / LABELLED).is_dir() and not overwrite:
        raise UsageError(f"{output} holds an earlier demo; choose another --output, or replace it with --overwrite")
    check_folder(output, overwrite=overwrite)
    subfolders = {FRAMES: {_folder_of(condition) for condition in CONDITIONS}, LABELLED: set(CONDITIONS)}
    for name, expected in subfolders.items():
        if unexpected := sorted(path for path in (output / name).glob("*") if path.name not in expected):
            raise UsageError(f"{unexpected[0]} is not from a demo, and would be deleted; choose another --output")
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
        for name in subfolders:
            shutil.rmtree(output / name, ignore_errors=True)  # a shorter drive must not keep old frames
            (output / name).mkdir()


def _folder_of(condition: str) -> str:
    return f"{list(CONDITIONS).index(condition)}_{condition}"


def draw_drive(folder: Path, frames_per_condition: int, seed: int) -> list[DriveFrame]:
    """Draw the frames of a drive into `folder/frames`, in order, and write `folder/labels.csv` for `remtta eval`."""
    rng = np.random.default_rng([_STREAM_SEED, seed])
    frames = []
    for condition, transform in CONDITIONS.items():
        subfolder = folder / FRAMES / _folder_of(condition)
        subfolder.mkdir(parents=True, exist_ok=True)
        for number in range(frames_per_condition):
            label = int(rng.integers(len(CLASS_NAMES)))
            path = subfolder / f"{number:04d}.png"
            Image.fromarray(transform(render_sign(label, rng), rng)).save(path, compress_level=1)
            frames.append(DriveFrame(path, condition, label))
    lines = [f"{frame.path.relative_to(folder)},{CLASS_NAMES[frame.label]}\n" for frame in frames]
    (folder / "labels.csv").write_text("".join(lines), encoding="utf-8")
    return frames


def label_drive(folder: Path, frames: Sequence[DriveFrame]) -> None:
    """Link the frames as `folder/labelled/<condition>/<class>/`, a tree that `remtta eval` reads."""
    for frame in frames:
        link = folder / LABELLED / frame.condition / CLASS_NAMES[frame.label] / frame.path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.hardlink_to(frame.path)
        except OSError:  # a file system without hard links
            shutil.copyfile(frame.path, link)
