"""The demo's plot: the running error, and the effect of the masks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.demo.drive import PICTURE, WINDOW
from remtta.demo.signs import CONDITIONS
from remtta.drawing import COLOURS, STYLE, running_error
from remtta.files import write_atomically
from remtta.methods.build import create_method
from remtta.methods.losses import entropy
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.embedded import CLASS_NAMES, EMBEDDED
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from remtta.demo.drive import DemoResult, DriveFrame

_BAND = "#f4f6fa"
_RIGHT, _WRONG = "#14783c", "#be2828"
_STRIPES = (70, 235)  # greys of a removed patch; at least one stands out on any image


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
    rem = create_method(REM, load_model(EMBEDDED), REMConfig(mask_ratios=(0.0, 0.2)))  # as in remtta
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


def hatch_masked(pixels: np.ndarray, visible: Collection[int], patch_size: tuple[int, int]) -> np.ndarray:
    """Return an image (H, W, 3), in uint8, with all patches but the visible ones, by index, hatched in two greys."""
    painted, (height, width) = pixels.copy(), patch_size
    y, x = np.indices(pixels.shape[:2])
    hatching = np.array(_STRIPES, dtype=np.uint8)[(y + x) // max(1, min(patch_size) // 4) % 2][..., None]
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    for position in set(range(rows * columns)).difference(visible):
        row, column = divmod(position, columns)
        patch = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
        painted[patch] = hatching[patch]
    return painted


def _example(result: DemoResult, condition: str) -> DriveFrame:
    """Return the last frame of a condition that remtta predicted correctly, else the last one."""
    outcomes = zip(result.frames, result.wrong["remtta"], strict=True)
    frames = [(is_wrong, frame) for frame, is_wrong in outcomes if frame.condition == condition]
    return next((frame for is_wrong, frame in reversed(frames) if not is_wrong), frames[-1][1])
