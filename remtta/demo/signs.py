"""Road signs drawn by seeded code: the labelled images of the demo.

Nothing here is a photograph, so the images carry no licence but the project's
own. A sign is drawn once per class at high resolution, then placed on a random
roadside background with random perspective, size, position and daylight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

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


class _Canvas:
    """A 100 x 100 drawing surface, the centre at (50, 50), y pointing down."""

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
        """A regular polygon; `turn` is the angle of its first corner in degrees."""
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


def _limit(text: str) -> Callable[[_Canvas], None]:
    def draw(canvas: _Canvas) -> None:
        canvas.disc(48, _RED)
        canvas.disc(37, _WHITE)
        canvas.text(text, 46 if len(text) == 2 else 34, _BLACK)

    return draw


def _arrow(turn: float) -> Callable[[_Canvas], None]:
    """A white arrow on a blue disc; `turn` is its direction, 0 = right, 90 = down."""

    def draw(canvas: _Canvas) -> None:
        canvas.disc(48, _BLUE)
        cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))

        def at(along: float, across: float) -> Point:
            return 50 + along * cos - across * sin, 50 + along * sin + across * cos

        canvas.line([at(-32, 0), at(14, 0)], 11, _WHITE)
        canvas.polygon([at(34, 0), at(6, -21), at(6, 21)], _WHITE)

    return draw


def _warning(canvas: _Canvas) -> None:
    canvas.regular(3, 54, -90, _RED)
    canvas.regular(3, 37, -90, _WHITE)


def _stop(canvas: _Canvas) -> None:
    canvas.regular(8, 49, 22.5, _WHITE)
    canvas.regular(8, 46, 22.5, _RED)
    canvas.text("STOP", 30, _WHITE)


def _give_way(canvas: _Canvas) -> None:
    canvas.regular(3, 54, 90, _RED)
    canvas.regular(3, 33, 90, _WHITE)


def _priority_road(canvas: _Canvas) -> None:
    canvas.regular(4, 49, 0, _WHITE)
    canvas.regular(4, 35, 0, _YELLOW)


def _no_entry(canvas: _Canvas) -> None:
    canvas.disc(48, _RED)
    canvas.line([(20, 50), (80, 50)], 18, _WHITE)


def _no_vehicles(canvas: _Canvas) -> None:
    canvas.disc(48, _RED)
    canvas.disc(37, _WHITE)


def _no_parking(canvas: _Canvas) -> None:
    canvas.disc(48, _RED)
    canvas.disc(37, _BLUE)
    canvas.line([(24, 24), (76, 76)], 10, _RED)


def _no_stopping(canvas: _Canvas) -> None:
    _no_parking(canvas)
    canvas.line([(76, 24), (24, 76)], 10, _RED)


def _end_of_limits(canvas: _Canvas) -> None:
    canvas.disc(48, _BLACK)
    canvas.disc(44, _WHITE)
    canvas.line([(78, 22), (22, 78)], 12, _BLACK)


def _roundabout(canvas: _Canvas) -> None:
    canvas.disc(48, _BLUE)
    for turn in (0.0, 120.0, 240.0):
        angles = [math.radians(turn + step) for step in range(0, 75, 15)]
        canvas.line([(50 + 24 * math.cos(a), 50 + 24 * math.sin(a)) for a in angles], 9, _WHITE)
        tip, base = math.radians(turn + 92), math.radians(turn + 58)
        canvas.polygon(
            [
                (50 + 24 * math.cos(tip), 50 + 24 * math.sin(tip)),
                (50 + 36 * math.cos(base), 50 + 36 * math.sin(base)),
                (50 + 12 * math.cos(base), 50 + 12 * math.sin(base)),
            ],
            _WHITE,
        )


def _danger(canvas: _Canvas) -> None:
    _warning(canvas)
    canvas.line([(50, 34), (50, 56)], 8, _BLACK)
    canvas.disc(4.5, _BLACK, (50, 66))


def _crossroads(canvas: _Canvas) -> None:
    _warning(canvas)
    canvas.line([(50, 32), (50, 68)], 8, _BLACK)
    canvas.line([(35, 54), (65, 54)], 8, _BLACK)


def _bend_left(canvas: _Canvas) -> None:
    _warning(canvas)
    canvas.line([(58, 69), (58, 54), (42, 46)], 7, _BLACK)
    canvas.polygon([(34, 42), (47, 38), (42, 53)], _BLACK)


def _bend_right(canvas: _Canvas) -> None:
    _warning(canvas)
    canvas.line([(42, 69), (42, 54), (58, 46)], 7, _BLACK)
    canvas.polygon([(66, 42), (53, 38), (58, 53)], _BLACK)


_SIGNS: dict[str, Callable[[_Canvas], None]] = {
    "speed limit 20": _limit("20"),
    "speed limit 30": _limit("30"),
    "speed limit 50": _limit("50"),
    "speed limit 70": _limit("70"),
    "speed limit 80": _limit("80"),
    "speed limit 100": _limit("100"),
    "end of limits": _end_of_limits,
    "stop": _stop,
    "give way": _give_way,
    "priority road": _priority_road,
    "no entry": _no_entry,
    "no vehicles": _no_vehicles,
    "no parking": _no_parking,
    "no stopping": _no_stopping,
    "turn left": _arrow(180),
    "turn right": _arrow(0),
    "straight ahead": _arrow(270),
    "roundabout": _roundabout,
    "danger": _danger,
    "crossroads": _crossroads,
    "bend left": _bend_left,
    "bend right": _bend_right,
}


@cache
def _template(label: int) -> Image.Image:
    canvas = _Canvas()
    _SIGNS[CLASS_NAMES[label]](canvas)
    # Half size: close to what the camera sees, so the bilinear placement below does not alias.
    return canvas.image.reduce(2)


def _background(rng: np.random.Generator) -> Image.Image:
    """Smooth random colours with a few hard-edged shapes: sky, walls, trees, poles."""
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
    """Coefficients that map output pixels to the template (Pillow's order)."""
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
    solution: list[float] = np.linalg.solve(np.array(rows), np.array(values)).tolist()
    return solution


def render_sign(label: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one road sign by daylight.

    Args:
        label: Class, a position in CLASS_NAMES.
        rng: Source of every random choice; the same state draws the same image.

    Returns:
        Shape (48, 48, 3), uint8 RGB.
    """
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
