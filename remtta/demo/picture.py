"""The demo's plot: the running error, and the effect of the masks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.demo.bad_weather import CONDITIONS
from remtta.demo.drive import WINDOW
from remtta.drawing import BAND, CELL, CELL_HEIGHT, COLOURS, PALE, RIGHT, WRONG, Cell, Sheet, draw_grid
from remtta.methods.mask_pictures import mask_pictures
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.embedded import CLASS_NAMES, EMBEDDED
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of

if TYPE_CHECKING:
    from remtta.demo.drive import DemoResult, DrivenFrame

_WIDTH, _CHART_HEIGHT = 960, 300
_LEFT, _TOP, _RIGHT = 72, 44, 120


def draw_picture(result: DemoResult, path: Path) -> None:
    """Draw a demo's running errors, and one masked frame per condition, into a PNG.

    Raises:
        OutputError: If it cannot be written.
    """
    ratios = REMConfig().mask_ratios
    sheet = Sheet(_WIDTH, _TOP + _CHART_HEIGHT + 88 + len(ratios) * CELL_HEIGHT)
    _draw_errors(sheet, result)
    _draw_masks(sheet, result, ratios, top=_TOP + _CHART_HEIGHT + 78)
    sheet.save(path)


def _draw_errors(sheet: Sheet, result: DemoResult) -> None:
    right, bottom = _WIDTH - _RIGHT, _TOP + _CHART_HEIGHT
    lengths = [len(list(group)) for _, group in groupby(result.frames, key=lambda frame: frame.condition)]
    curves = {method: running_means(wrong, lengths) for method, wrong in result.wrong.items()}
    highest = max(max(part) for parts in curves.values() for part in parts)
    top_error = 10 * math.ceil(highest / 10 + 0.2)
    num_frames = len(result.frames)

    def x_of(frame: float) -> float:
        return _LEFT + (right - _LEFT) * frame / num_frames

    def y_of(error: float) -> float:
        return bottom - _CHART_HEIGHT * error / top_error

    start = 0
    for number, (condition, group) in enumerate(groupby(result.frames, key=lambda frame: frame.condition)):
        stop = start + len(list(group))
        if number % 2 == 0:
            sheet.box((x_of(start), _TOP, x_of(stop), bottom), BAND)
        sheet.text(x_of((start + stop) / 2), _TOP - 12, condition, anchor="mm")
        start = stop
    for error in range(0, top_error + 1, 10 if top_error <= 60 else 20):
        sheet.line([(_LEFT, y_of(error)), (right, y_of(error))], PALE)
        sheet.text(_LEFT - 8, y_of(error), str(error), anchor="rm", size=12)
    sheet.text(12, 14, f"error in %, mean over the {WINDOW} frames around each, within its condition", size=13)
    sheet.text((_LEFT + right) / 2, bottom + 16, f"{num_frames} frames", anchor="mm", size=12)
    for method, parts in curves.items():
        start = 0
        for part in parts:
            points = [(x_of(start + frame + 0.5), y_of(value)) for frame, value in enumerate(part)]
            sheet.line(points, COLOURS[method], 2.2)
            start += len(part)
    for rank, method in enumerate(sorted(curves, key=lambda name: -result.errors(name)["mean"])):
        mean = result.errors(method)["mean"]
        y = _TOP + 20 + 40 * rank
        sheet.text(right + 12, y, method, colour=COLOURS[method], size=15)
        sheet.text(right + 12, y + 17, f"mean {mean:.1f} %", colour=COLOURS[method], size=12)


def running_means(wrong: Sequence[bool], lengths: Sequence[int]) -> list[list[float]]:
    """Return the error in percent over the `WINDOW` frames around each frame, a list for each condition by itself."""
    total, first, half, parts = [0, *accumulate(wrong)], 0, WINDOW // 2, []
    for length in lengths:
        last = first + length
        windows = [(max(first, frame - half), min(last, frame + half)) for frame in range(first, last)]
        parts.append([100 * (total[stop] - total[start]) / (stop - start) for start, stop in windows])
        first = last
    return parts


def _draw_masks(sheet: Sheet, result: DemoResult, ratios: Sequence[float], top: int) -> None:
    model = load_model(EMBEDDED)
    rem = REM(model)
    rem.load_delta(load_delta(result.output / "remtta" / DELTA).tensors)
    frames = [_example(result, condition) for condition in CONDITIONS]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(frame.path))) for frame in frames]).permute(0, 3, 1, 2)
    sheet.text(12, top - 40, "What the masks hide, with the adapted model's prediction (green: right, red: wrong)")
    sheet.text(12, top - 22, "and its entropy in nats, which REM trains to rise as more is hidden")
    for row, ratio in enumerate(ratios):
        y = top + row * CELL_HEIGHT
        sheet.text(12, y + CELL / 2 - 8, f"{ratio:.0%}", size=15)
        sheet.text(12, y + CELL / 2 + 9, "masked", size=12)
    rows = [
        [
            Cell(pixels, CLASS_NAMES[guess], f"{nats:.2f}", RIGHT if guess == frame.label else WRONG)
            for (pixels, guess, nats), frame in zip(view, frames, strict=True)
        ]
        for view in mask_pictures(rem, pixels, preprocessing_of(model))
    ]
    draw_grid(sheet, (_LEFT, top, _WIDTH - 16), rows)


def _example(result: DemoResult, condition: str) -> DrivenFrame:
    """Return the last frame of a condition that remtta predicted correctly, else the last one."""
    outcomes = zip(result.frames, result.wrong["remtta"], strict=True)
    frames = [(missed, frame) for frame, missed in outcomes if frame.condition == condition]
    return next((frame for missed, frame in reversed(frames) if not missed), frames[-1][1])
