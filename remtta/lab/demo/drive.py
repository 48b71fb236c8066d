"""The demo: an embedded road-sign classifier on a drive into bad weather, adapted through the usual code path."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure, FigureBase
from PIL import Image

from remtta.adapt.one_stream import adapt_stream
from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.errors import UsageError
from remtta.files import write_atomically, writing
from remtta.interrupts import Interrupts, Stopped
from remtta.lab.demo.demo_model import CLASS_NAMES, DEMO_MODEL
from remtta.lab.demo.signs import CONDITIONS, render_sign
from remtta.lab.drawing import COLOURS, STYLE, running_error
from remtta.methods.build import create_method
from remtta.methods.losses import entropy
from remtta.methods.rem import REM
from remtta.methods.settings.rem_config import REMConfig
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of
from remtta.options import RunOptions
from remtta.runs.callbacks import Callback
from remtta.runs.folder import PREDICTIONS, check_folder
from remtta.runs.reading import read_rows

BATCH_SIZE = 20
METHODS = ("source", "remtta")
FRAMES, LABELLED, PICTURE = "frames", "labelled", "demo.png"
WINDOW = 80
"""Number of frames over which the picture's curve is averaged."""

_BAND = "#f4f6fa"
_RIGHT, _WRONG = "#14783c", "#be2828"
_STRIPES = (70, 235)  # greys of a removed patch; at least one stands out on any image
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
    callbacks: Sequence[Callback] = (),
    interrupts: Interrupts | None = None,
) -> DemoResult:
    """Run the embedded model through every condition, without and with adaptation.

    Writes the frames, the same frames in a labelled tree for `remtta eval`, a run folder per method, and the plot
    `demo.png`; the callbacks see both runs. Raise UsageError if the folder is not empty and may not be overwritten;
    OutputError if results cannot be written.
    """
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
            load_model(DEMO_MODEL),
            output / FRAMES,
            output / method,
            method=method,
            options=RunOptions(batch_size=BATCH_SIZE, overwrite=overwrite),
            callbacks=callbacks,
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
    """Draw the frames of a drive into `folder/frames`, in order."""
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


# --- The plot: the running error, and the effect of the masks --------------------------------------------------------


@rc_context(STYLE)
def draw_picture(result: DemoResult) -> None:
    """Draw a demo's running errors, and one masked frame per condition, into its picture."""
    figure = Figure(figsize=(9.6, 8.4), dpi=100, layout="constrained")
    errors, masks = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 4))[:, 0]
    _draw_errors(errors, result)
    _draw_masks(masks, result)
    write_atomically(result.output / PICTURE, partial(figure.savefig, format="png"))


def _draw_errors(figure: FigureBase, result: DemoResult) -> None:
    axes = figure.subplots()
    conditions = {name: len(list(group)) for name, group in groupby(frame.condition for frame in result.frames)}
    start = 0
    for number, (condition, length) in enumerate(conditions.items()):
        axes.axvspan(start, start + length, color="white" if number % 2 else _BAND, zorder=0)
        axes.text(start + length / 2, 1.02, condition, ha="center", transform=axes.get_xaxis_transform())
        start += length
    for method, wrong in result.wrong.items():
        first, label = 0, f"{method}\nmean {result.errors(method)['mean']:.1f} %"
        for length in conditions.values():
            part = running_error(wrong[first : first + length], WINDOW)
            axes.plot(range(first, first + length), part, color=COLOURS[method], label=None if first else label)
            first += length
    axes.set(xlim=(0, start), ylim=(0, None), xlabel=f"{start} frames")
    axes.set_ylabel(f"error in %, mean over the {WINDOW} frames\naround each, within its condition", fontsize=9)
    axes.grid(axis="y", alpha=0.4)
    axes.legend(labelcolor="linecolor", loc="upper left", bbox_to_anchor=(1, 1))


@torch.no_grad()
def _draw_masks(figure: FigureBase, result: DemoResult) -> None:
    """Draw a frame of each condition as every view sees it, with the prediction and its entropy."""
    rem = create_method(REM, load_model(DEMO_MODEL), REMConfig(mask_ratios=(0.0, 0.2)))  # as in remtta
    rem.load_delta(load_delta(result.output / "remtta" / DELTA).tensors)
    frames = [_example(result, condition) for condition in CONDITIONS]
    images = [np.array(Image.open(frame.path)) for frame in frames]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    views, masks = rem.views(preprocessing_of(rem.model.model).normalise(pixels))
    figure.suptitle(
        "What the mask hides, with the adapted model's prediction (green: right, red: wrong)\nand its entropy in nats",
        fontsize=10,
    )
    panels = figure.subplots(len(views), len(frames))
    for row, logits, visible, ratio in zip(panels, views, [None, *masks], rem.config.mask_ratios, strict=True):
        row[0].set_ylabel(f"{ratio:.0%}\nmasked", rotation=0, ha="right", va="center", fontsize=8)
        predictions, entropies = logits.argmax(1).tolist(), entropy(logits).abs().tolist()
        for column, (axes, frame) in enumerate(zip(row, frames, strict=True)):
            image, prediction = images[column], predictions[column]
            if visible is not None:
                image = hatch_masked(image, visible[column].tolist(), rem.model.backbone.patch_size)
            axes.imshow(image)
            colour = _RIGHT if prediction == frame.label else _WRONG
            axes.set_xlabel(f"{CLASS_NAMES[prediction]}\n{entropies[column]:.2f}", color=colour, fontsize=8)
            axes.set(xticks=[], yticks=[])


def hatch_masked(pixels: np.ndarray, visible: Sequence[int], patch_size: tuple[int, int]) -> np.ndarray:
    """Return an image (H, W, 3), in uint8, with all patches but the visible ones, by index, hatched in two greys."""
    height, width = patch_size
    masked = np.ones((pixels.shape[0] // height, pixels.shape[1] // width), dtype=bool)
    masked.flat[visible] = False
    y, x = np.indices(pixels.shape[:2])
    hatching = np.array(_STRIPES, dtype=np.uint8)[(y + x) // max(1, min(patch_size) // 4) % 2]
    return np.where(masked.repeat(height, 0).repeat(width, 1)[..., None], hatching[..., None], pixels)


def _example(result: DemoResult, condition: str) -> DriveFrame:
    """Return the last frame of a condition that remtta predicted correctly, else the last one."""
    outcomes = zip(result.frames, result.wrong["remtta"], strict=True)
    frames = [(is_wrong, frame) for frame, is_wrong in outcomes if frame.condition == condition]
    return next((frame for is_wrong, frame in reversed(frames) if not is_wrong), frames[-1][1])
