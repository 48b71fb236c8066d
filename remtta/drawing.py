"""Drawing with Pillow alone: text, lines, frames with their masks, grids of them, and colours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from remtta.files import write_atomically

COLOURS = {
    "source": "#969696",
    "tent": "#d98c1f",
    "pseudo-label": "#8c6bb1",
    "remtta": "#1a1a1a",
    "rem": "#195fbe",
    "rem-n1": "#41a6d9",
    "supervised": "#14783c",
}
"""Colours of methods, the same in every plot."""

RIGHT, WRONG = "#14783c", "#be2828"
INK, PALE, BAND = "#282828", "#cdcdcd", "#f4f6fa"
_STRIPES = (70, 235)  # greys of a removed patch; at least one stands out on any image

Box = tuple[float, float, float, float]


class Sheet:
    """A drawing surface in units of final pixels.

    Args:
        width: In pixels.
        height: In pixels.
        paper: Background colour.
        scale: Supersampling factor, for smooth lines.
    """

    def __init__(self, width: int, height: int, paper: str = "white", scale: int = 2) -> None:
        self._image, self._scale = Image.new("RGB", (width * scale, height * scale), paper), scale
        self._draw = ImageDraw.Draw(self._image)

    @property
    def image(self) -> Image.Image:
        """The drawing."""
        return self._image.reduce(self._scale) if self._scale > 1 else self._image

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        """Draw a line through points."""
        scaled = [(x * self._scale, y * self._scale) for x, y in points]
        self._draw.line(scaled, fill=colour, width=round(width * self._scale), joint="curve")

    def box(self, box: Box, colour: str) -> None:
        """Fill a box."""
        self._draw.rectangle([value * self._scale for value in box], fill=colour)

    def text(self, x: float, y: float, text: str, *, anchor: str = "lm", size: int = 13, colour: str = INK) -> None:
        """Write a line of text; `anchor` is Pillow's."""
        printable = "".join(sign if sign.isprintable() else "?" for sign in text)
        place = (x * self._scale, y * self._scale)
        self._draw.text(place, printable, fill=colour, font=_font(size * self._scale), anchor=anchor)

    def paste(self, image: Image.Image, x: int, y: int, width: int, height: int) -> None:
        """Paste an image, resized; when enlarged, its pixels stay visible."""
        sides = (width * self._scale, height * self._scale)
        way = Image.Resampling.NEAREST if image.width <= sides[0] else Image.Resampling.BOX
        self._image.paste(image.resize(sides, way), (x * self._scale, y * self._scale))

    def save(self, path: Path) -> None:
        """Write a PNG.

        Raises:
            OutputError: If it cannot be written.
        """
        write_atomically(path, lambda temporary: self.image.save(temporary, "PNG"))


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


class Cell(NamedTuple):
    """A cell of a grid: pixels (H, W, 3), and two lines of text below, the first in a colour."""

    pixels: np.ndarray
    title: str
    note: str
    colour: str = INK


CELL, CELL_HEIGHT = 96, 140
"""Side of a cell's picture, and height of the cell with its text, in pixels."""


def draw_grid(sheet: Sheet, box: tuple[int, int, int], rows: Sequence[Sequence[Cell]]) -> None:
    """Draw a grid of cells.

    Args:
        sheet: The sheet to draw on.
        box: Left, top and right end, in pixels; the cells of a row are spread in between.
        rows: The cells, with equal numbers per row.
    """
    left, top, right = box
    for number, row in enumerate(rows):
        step, y = (right - left) / len(row), top + number * CELL_HEIGHT
        for column, cell in enumerate(row):
            x = round(left + column * step + (step - CELL) / 2)
            sheet.box((x - 1, y - 1, x + CELL, y + CELL), PALE)
            sheet.paste(Image.fromarray(cell.pixels), x, y, CELL, CELL)
            sheet.text(x + CELL / 2, y + CELL + 12, cell.title, anchor="mm", size=12, colour=cell.colour)
            sheet.text(x + CELL / 2, y + CELL + 28, cell.note, anchor="mm", size=12)


def paint_over(pixels: np.ndarray, kept: Collection[int], patch_size: tuple[int, int]) -> np.ndarray:
    """Return an image as a masked view sees it.

    Args:
        pixels: Shape (H, W, 3), uint8.
        kept: Indices of the patches that are kept, in row-major order.
        patch_size: Height and width of a patch, in pixels.

    Returns:
        Shape (H, W, 3), uint8, with the other patches hatched in two greys.
    """
    painted, (height, width) = pixels.copy(), patch_size
    down, across = np.indices(pixels.shape[:2])
    hatching = np.array(_STRIPES, dtype=np.uint8)[(down + across) // max(1, min(patch_size) // 4) % 2][..., None]
    rows, columns = pixels.shape[0] // height, pixels.shape[1] // width
    for position in set(range(rows * columns)).difference(kept):
        row, column = divmod(position, columns)
        place = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
        painted[place] = hatching[place]
    return painted
