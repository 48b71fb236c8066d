"""The demo's plot: the running error, and the effect of the masks."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.demo.bad_weather import CONDITIONS
from remtta.demo.drive import WINDOW
from remtta.drawing import COLOURS, RIGHT, WRONG, Cell, draw_grid, running_error
from remtta.files import write_atomically
from remtta.methods.mask_pictures import mask_pictures
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.embedded import CLASS_NAMES, EMBEDDED
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

    from remtta.demo.drive import DemoResult, DrivenFrame

_BAND = "#f4f6fa"


def draw_picture(result: DemoResult, path: Path) -> None:
    """Draw a demo's running errors, and one masked frame per condition, into a PNG."""
    figure = Figure(figsize=(9.6, 8.4), dpi=100, layout="constrained")
    errors, masks = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 4))[:, 0]
    _draw_errors(errors, result)
    _draw_masks(masks, result)
    write_atomically(path, partial(figure.savefig, format="png"))


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
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.4)
    axes.legend(frameon=False, labelcolor="linecolor", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_masks(figure: FigureBase, result: DemoResult) -> None:
    model = load_model(EMBEDDED)
    rem = REM(model)
    rem.load_delta(load_delta(result.output / "remtta" / DELTA).tensors)
    frames = [_example(result, condition) for condition in CONDITIONS]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(frame.path))) for frame in frames]).permute(0, 3, 1, 2)
    rows = [
        [
            Cell(pixels, CLASS_NAMES[guess], f"{nats:.2f}", RIGHT if guess == frame.label else WRONG)
            for (pixels, guess, nats), frame in zip(view, frames, strict=True)
        ]
        for view in mask_pictures(rem, pixels, preprocessing_of(model))
    ]
    figure.suptitle(
        "What the masks hide, with the adapted model's prediction (green: right, red: wrong)\n"
        "and its entropy in nats, which REM trains to rise as more is hidden",
        fontsize=10,
    )
    draw_grid(figure, rows, [f"{ratio:.0%}\nmasked" for ratio in REMConfig().mask_ratios])


def _example(result: DemoResult, condition: str) -> DrivenFrame:
    """Return the last frame of a condition that remtta predicted correctly, else the last one."""
    outcomes = zip(result.frames, result.wrong["remtta"], strict=True)
    frames = [(missed, frame) for frame, missed in outcomes if frame.condition == condition]
    return next((frame for missed, frame in reversed(frames) if not missed), frames[-1][1])
