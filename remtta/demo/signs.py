"""Road signs drawn by seeded code: the labelled images of the demo.

There are no photographs, so the images carry no licence but the project's own. Each sign is drawn once at high
resolution, then placed on a random roadside background with random perspective, size, position and daylight.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from remtta.models.embedded import CLASS_NAMES

IMAGE_SIZE = 48
"""Height and width of a rendered image, in pixels."""

_TEMPLATE_SIZE = 192  # signs are drawn this large, in units of _UNIT below
_UNIT = _TEMPLATE_SIZE / 100  # the drawing functions use a 100 x 100 canvas

_RED = (190, 25, 35)
_BLUE = (20, 75, 160)
_YELLOW = (245, 190, 30)
_WHITE = (240, 240, 235)
_BLACK = (25, 25, 25)

Point = tuple[float, float]
Colour = tuple[int, int, int]
Shape = tuple[Any, ...]
"""The name of a `_Canvas` method, and its arguments."""


class _Canvas:
    """A 100 x 100 drawing surface with its centre at (50, 50) and y pointing down."""

    def __init__(self) -> None:
        self.image = Image.new("RGBA", (_TEMPLATE_SIZE, _TEMPLATE_SIZE), (0, 0, 0, 0))
        self._draw = ImageDraw.Draw(self.image)

    def disc(self, radius: float, colour: Colour, centre: Point = (50, 50)) -> None:
        x, y = centre
        box = [(x - radius) * _UNIT, (y - radius) * _UNIT, (x + radius) * _UNIT, (y + radius) * _UNIT]
        self._draw.ellipse(box, fill=colour)

    def polygon(self, points: list[Point], colour: Colour) -> None:
        self._draw.polygon([(x * _UNIT, y * _UNIT) for x, y in points], fill=colour)

    def regular(self, corners: int, radius: float, turn: float, colour: Colour) -> None:
        """Draw a regular polygon; `turn` is the angle of its first corner in degrees."""
        angles = [math.radians(turn + 360 * k / corners) for k in range(corners)]
        self.polygon([(50 + radius * math.cos(a), 50 + radius * math.sin(a)) for a in angles], colour)

    def line(self, points: list[Point], width: float, colour: Colour) -> None:
        scaled = [(x * _UNIT, y * _UNIT) for x, y in points]
        self._draw.line(scaled, fill=colour, width=round(width * _UNIT), joint="curve")

    def text(self, text: str, size: float, colour: Colour) -> None:
        font = ImageFont.load_default(size * _UNIT)
        stroke = round(1.2 * _UNIT)
        self._draw.text(
            (50 * _UNIT, 50 * _UNIT), text, fill=colour, font=font, anchor="mm", stroke_width=stroke, stroke_fill=colour
        )


_RED_RING: list[Shape] = [("disc", 48, _RED), ("disc", 37, _WHITE)]
_NO_PARKING: list[Shape] = [("disc", 48, _RED), ("disc", 37, _BLUE), ("line", [(24, 24), (76, 76)], 10, _RED)]
_WARNING: list[Shape] = [("regular", 3, 54, -90, _RED), ("regular", 3, 37, -90, _WHITE)]


def _arrow(turn: float) -> list[Shape]:
    """Return a white arrow on a blue disc; `turn` is its direction, 0 = right, 90 = down."""
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))

    def at(along: float, across: float) -> Point:
        return 50 + along * cos - across * sin, 50 + along * sin + across * cos

    shaft, head = [at(-32, 0), at(14, 0)], [at(34, 0), at(6, -21), at(6, 21)]
    return [("disc", 48, _BLUE), ("line", shaft, 11, _WHITE), ("polygon", head, _WHITE)]


def _roundabout() -> list[Shape]:
    """Return three curved arrows on a blue disc."""

    def at(radius: float, angle: float) -> Point:
        return 50 + radius * math.cos(math.radians(angle)), 50 + radius * math.sin(math.radians(angle))

    shapes: list[Shape] = [("disc", 48, _BLUE)]
    for turn in (0.0, 120.0, 240.0):
        shapes.append(("line", [at(24, turn + step) for step in range(0, 75, 15)], 9, _WHITE))
        shapes.append(("polygon", [at(24, turn + 92), at(36, turn + 58), at(12, turn + 58)], _WHITE))
    return shapes


_SIGNS: dict[str, list[Shape]] = {
    **{f"speed limit {n}": [*_RED_RING, ("text", f"{n}", 46, _BLACK)] for n in (20, 30, 50, 70, 80)},
    "speed limit 100": [*_RED_RING, ("text", "100", 34, _BLACK)],
    "end of limits": [("disc", 48, _BLACK), ("disc", 44, _WHITE), ("line", [(78, 22), (22, 78)], 12, _BLACK)],
    "stop": [("regular", 8, 49, 22.5, _WHITE), ("regular", 8, 46, 22.5, _RED), ("text", "STOP", 30, _WHITE)],
    "give way": [("regular", 3, 54, 90, _RED), ("regular", 3, 33, 90, _WHITE)],
    "priority road": [("regular", 4, 49, 0, _WHITE), ("regular", 4, 35, 0, _YELLOW)],
    "no entry": [("disc", 48, _RED), ("line", [(20, 50), (80, 50)], 18, _WHITE)],
    "no vehicles": _RED_RING,
    "no parking": _NO_PARKING,
    "no stopping": [*_NO_PARKING, ("line", [(76, 24), (24, 76)], 10, _RED)],
    "turn left": _arrow(180),
    "turn right": _arrow(0),
    "straight ahead": _arrow(270),
    "roundabout": _roundabout(),
    "danger": [*_WARNING, ("line", [(50, 34), (50, 56)], 8, _BLACK), ("disc", 4.5, _BLACK, (50, 66))],
    "crossroads": [*_WARNING, ("line", [(50, 32), (50, 68)], 8, _BLACK), ("line", [(35, 54), (65, 54)], 8, _BLACK)],
    "bend left": [
        *_WARNING,
        ("line", [(58, 69), (58, 54), (42, 46)], 7, _BLACK),
        ("polygon", [(34, 42), (47, 38), (42, 53)], _BLACK),
    ],
    "bend right": [
        *_WARNING,
        ("line", [(42, 69), (42, 54), (58, 46)], 7, _BLACK),
        ("polygon", [(66, 42), (53, 38), (58, 53)], _BLACK),
    ],
}
"""The shapes of each sign, in drawing order."""


@cache
def _template(label: int) -> Image.Image:
    canvas = _Canvas()
    for shape, *how in _SIGNS[CLASS_NAMES[label]]:
        getattr(canvas, shape)(*how)
    # Half size: close to what the camera sees, so the bilinear placement below does not alias.
    return canvas.image.reduce(2)


def _background(rng: np.random.Generator) -> Image.Image:
    """Return smooth random colours with a few hard-edged shapes: sky, walls, trees, poles."""
    coarse = rng.uniform(20, 220, (int(rng.integers(2, 7)), int(rng.integers(2, 7)), 1))
    tint = coarse + rng.uniform(-50, 50, (*coarse.shape[:2], 3))
    small = Image.fromarray(tint.clip(0, 255).astype(np.uint8))
    image = small.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(0, 5))):
        x0, y0 = rng.uniform(-10, IMAGE_SIZE, 2)
        width, height = rng.uniform(2, 30, 2)
        colour = tuple(int(v) for v in rng.integers(10, 240, 3))
        shape = draw.ellipse if rng.random() < 0.4 else draw.rectangle
        shape([x0, y0, x0 + width, y0 + height], fill=colour)
    return image


def _perspective(rng: np.random.Generator, template_size: int) -> list[float]:
    """Return the coefficients that map output pixels to the template, in Pillow's order."""
    half = IMAGE_SIZE * rng.uniform(0.30, 0.46)
    centre = IMAGE_SIZE / 2 + rng.uniform(-1, 1, 2) * (IMAGE_SIZE / 2 - half) * 0.9
    angle = math.radians(rng.uniform(-12, 12))
    cos, sin = math.cos(angle), math.sin(angle)
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=float)
    corners = corners * [rng.uniform(0.78, 1.0), 1.0] + rng.uniform(-0.09, 0.09, (4, 2))
    target = centre + half * corners @ np.array([[cos, sin], [-sin, cos]])
    side = float(template_size)
    origin = [(0.0, 0.0), (side, 0.0), (side, side), (0.0, side)]
    rows, values = [], []
    for (x, y), (u, v) in zip(target, origin, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    return np.linalg.solve(np.array(rows), np.array(values)).tolist()


def render_sign(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one road sign in daylight: shape (48, 48, 3), uint8 RGB. `label` is an index into CLASS_NAMES."""
    template = _template(label)
    image = _background(rng)
    placed = template.transform(
        (IMAGE_SIZE, IMAGE_SIZE),
        Image.Transform.PERSPECTIVE,
        _perspective(rng, template.width),
        Image.Resampling.BILINEAR,
    )
    image.paste(placed, mask=placed.getchannel("A"))
    daylight = rng.uniform(0.75, 1.1) * rng.uniform(0.95, 1.05, 3)
    return (np.asarray(image) * daylight).clip(0, 255).astype(np.uint8)
