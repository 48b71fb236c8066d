"""Shared by the pictures that are drawn with matplotlib: colours, images with captions, masks, running errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

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
_STRIPES = (70, 235)  # greys of a removed patch; at least one stands out on any image


class Cell(NamedTuple):
    """An image of a grid: pixels (H, W, 3), and two lines of text below, in a colour."""

    pixels: np.ndarray
    title: str
    note: str
    colour: str


def draw_grid(figure: FigureBase, rows: Sequence[Sequence[Cell]], left: Sequence[str], top: Sequence[str] = ()) -> None:
    """Draw images with their captions.

    Args:
        figure: Where to draw.
        rows: The images, with equal numbers per row.
        left: Text beside each row.
        top: Text above each column, if any.
    """
    panels = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for line, row in zip(panels, rows, strict=True):
        for axes, cell in zip(line, row, strict=True):
            axes.imshow(cell.pixels)
            axes.set_xlabel(f"{cell.title}\n{cell.note}", color=cell.colour, fontsize=8, parse_math=False)
            axes.set(xticks=[], yticks=[])
    for axes, text in zip(panels[:, 0], left, strict=True):
        axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=8)
    for axes, text in zip(panels[0], top, strict=False):
        axes.set_title(text, fontsize=8)


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


def running_error(missed: Sequence[int], window: int | None = None) -> np.ndarray:
    """Return the error in percent of the `window` images around each image; at both ends, of those that there are.

    Args:
        missed: Whether each image was misclassified, in order.
        window: By default a quarter of the images, but at least 20 and at most 200.

    Returns:
        Shape (n,).
    """
    window = window or min(200, max(20, len(missed) // 4))
    total, places = np.cumsum([0, *missed]), np.arange(len(missed))
    starts, stops = np.maximum(0, places - window // 2), np.minimum(len(missed), places + (window + 1) // 2)
    errors: np.ndarray = 100 * (total[stops] - total[starts]) / (stops - starts)
    return errors
