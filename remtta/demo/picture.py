"""The demo's picture: the running error, and what the masks hide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from remtta.deltas import DELTA
from remtta.deltas.delta import load_delta
from remtta.demo.conditions import CONDITIONS
from remtta.files import write_atomically
from remtta.methods.losses import entropy
from remtta.methods.masking import paint_over
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.embedded import CLASS_NAMES, EMBEDDED
from remtta.models.loading import load_model
from remtta.models.preprocessing import preprocessing_of

if TYPE_CHECKING:
    from remtta.demo.drive import DemoResult, DrivenFrame

_SCALE = 2  # everything is drawn twice as large and reduced, for smooth lines
_WIDTH, _CHART_HEIGHT, _CELL = 960, 300, 96
_LEFT, _TOP, _RIGHT = 72, 44, 120
_WINDOW = 80  # frames in the running error
_COLOURS = {"source": (150, 150, 150), "remtta": (25, 95, 190)}
_INK, _PALE, _BAND = (40, 40, 40), (205, 205, 205), (244, 246, 250)

Box = tuple[float, float, float, float]


class _Sheet:
    """A white sheet with units of final pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), "white")
        self._draw = ImageDraw.Draw(self.image)

    def line(self, points: Sequence[tuple[float, float]], colour: tuple[int, int, int], width: float = 1) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        self._draw.line(scaled, fill=colour, width=round(width * _SCALE), joint="curve")

    def box(self, box: Box, colour: tuple[int, int, int]) -> None:
        self._draw.rectangle([value * _SCALE for value in box], fill=colour)

    def text(self, x: float, y: float, text: str, *, anchor: str = "lm", size: int = 13, colour: object = _INK) -> None:
        font = ImageFont.load_default(size * _SCALE)
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=colour, font=font, anchor=anchor)  # type: ignore[arg-type]

    def paste(self, image: Image.Image, x: int, y: int, size: int) -> None:
        side = size * _SCALE
        corner = (x * _SCALE, y * _SCALE)
        self.image.paste(image.resize((side, side), Image.Resampling.NEAREST), corner)
        self._draw.rectangle([*corner, corner[0] + side, corner[1] + side], outline=_PALE, width=_SCALE)


def draw_picture(result: DemoResult, path: Path) -> None:
    """Draw a demo's running errors, and one masked frame per condition, into a PNG.

    Raises:
        OutputError: If it cannot be written.
    """
    ratios = REMConfig().mask_ratios
    sheet = _Sheet(_WIDTH, _TOP + _CHART_HEIGHT + 70 + len(ratios) * (_CELL + 44))
    _draw_errors(sheet, result)
    _draw_masks(sheet, result, ratios, top=_TOP + _CHART_HEIGHT + 60)
    final = sheet.image.reduce(_SCALE)
    write_atomically(path, lambda temporary: final.save(temporary, "PNG"))


def _draw_errors(sheet: _Sheet, result: DemoResult) -> None:
    right, bottom = _WIDTH - _RIGHT, _TOP + _CHART_HEIGHT
    curves = {method: _running_mean(result.wrong[method]) for method in result.wrong}
    highest = max(max(curve) for curve in curves.values())
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
            sheet.box((x_of(start), _TOP, x_of(stop), bottom), _BAND)
        sheet.text(x_of((start + stop) / 2), _TOP - 12, condition, anchor="mm")
        start = stop
    for error in range(0, top_error + 1, 10 if top_error <= 60 else 20):
        sheet.line([(_LEFT, y_of(error)), (right, y_of(error))], _PALE)
        sheet.text(_LEFT - 8, y_of(error), str(error), anchor="rm", size=12)
    sheet.text(12, 14, f"error in %, running mean over {_WINDOW} frames", size=13)
    sheet.text((_LEFT + right) / 2, bottom + 16, f"{num_frames} frames", anchor="mm", size=12)
    for method, curve in curves.items():
        points = [(x_of(frame + 0.5), y_of(value)) for frame, value in enumerate(curve)]
        sheet.line(points, _COLOURS[method], 2.2)
    for rank, method in enumerate(sorted(curves, key=lambda name: -result.errors(name)["mean"])):
        mean = result.errors(method)["mean"]
        y = _TOP + 20 + 40 * rank
        sheet.text(right + 12, y, method, colour=_COLOURS[method], size=15)
        sheet.text(right + 12, y + 17, f"mean {mean:.1f} %", colour=_COLOURS[method], size=12)


def _running_mean(wrong: Sequence[bool]) -> list[float]:
    """Percent wrong among the last frames, up to `_WINDOW` of them."""
    total = [0, *accumulate(wrong)]
    starts = [max(0, stop - _WINDOW) for stop in range(1, len(total))]
    return [100 * (total[stop] - total[start]) / (stop - start) for stop, start in enumerate(starts, 1)]


@torch.no_grad()
def _draw_masks(sheet: _Sheet, result: DemoResult, ratios: Sequence[float], top: int) -> None:
    model = load_model(EMBEDDED)
    rem = REM(model)
    rem.load_delta(load_delta(result.output / "remtta" / DELTA).tensors)
    frames = [_example(result, condition) for condition in CONDITIONS]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(frame.path))) for frame in frames])
    images = preprocessing_of(model).normalise(pixels.permute(0, 3, 1, 2))
    views, masks = rem.objective.views(images)
    kept: list[torch.Tensor | None] = [None, *masks]
    sheet.text(
        12,
        top - 22,
        "What the masks hide, with the adapted model's prediction (green: right, red: wrong) and its entropy in nats",
    )
    step = (_WIDTH - _LEFT - 16) / len(frames)
    for row, ratio in enumerate(ratios):
        y = top + row * (_CELL + 44)
        sheet.text(12, y + _CELL / 2 - 8, f"{ratio:.0%}", size=15)
        sheet.text(12, y + _CELL / 2 + 9, "masked", size=12)
        for column, frame in enumerate(frames):
            x = round(_LEFT + column * step + (step - _CELL) / 2)
            chosen = kept[row]
            positions = None if chosen is None else chosen[column]
            shown = Image.fromarray(paint_over(pixels[column].numpy(), positions, rem.net.backbone.patch_size))
            sheet.paste(shown, x, y, _CELL)
            logits = views[row, column]
            guess, nats = int(logits.argmax()), float(entropy(logits))
            colour = (20, 120, 60) if guess == frame.label else (190, 40, 40)
            sheet.text(x + _CELL / 2, y + _CELL + 12, CLASS_NAMES[guess], anchor="mm", size=12, colour=colour)
            sheet.text(x + _CELL / 2, y + _CELL + 28, f"{abs(nats):.2f}", anchor="mm", size=12)


def _example(result: DemoResult, condition: str) -> DrivenFrame:
    """The last frame of a condition that remtta got right on the drive, else the last one."""
    outcomes = zip(result.frames, result.wrong["remtta"], strict=True)
    frames = [(missed, frame) for frame, missed in outcomes if frame.condition == condition]
    return next((frame for missed, frame in reversed(frames) if not missed), frames[-1][1])
