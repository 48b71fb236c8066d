"""Road signs and weather drawn by seeded code: the labelled images of the demo.

There are no photographs, so the images carry no licence but the project's own. A sign is drawn once at high
resolution, then placed on a random roadside background with random perspective, size, position and daylight. The model
was trained on none of the conditions except "clear" (examples/train_demo_model.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from remtta.lab.demo.demo_model import CLASS_NAMES

IMAGE_SIZE = 48
"""Height and width of a rendered image, in pixels."""

_TEMPLATE_SIZE = 192  # signs are drawn this large, for a canvas of 100 x 100
_UNIT = _TEMPLATE_SIZE / 100

_RED = (190, 25, 35)
_BLUE = (20, 75, 160)
_YELLOW = (245, 190, 30)
_WHITE = (240, 240, 235)
_BLACK = (25, 25, 25)

Point = tuple[float, float]
Colour = tuple[int, int, int]
Shape = Callable[[ImageDraw.ImageDraw], None]
"""Draws a shape on a 100 x 100 canvas with its centre at (50, 50) and y pointing down."""


def _scaled(points: Iterable[Point]) -> list[Point]:
    return [(x * _UNIT, y * _UNIT) for x, y in points]


def _disc(radius: float, colour: Colour, centre: Point = (50, 50)) -> Shape:
    x, y = centre
    box = _scaled([(x - radius, y - radius), (x + radius, y + radius)])
    return lambda draw: draw.ellipse(box, fill=colour)


def _polygon(points: Iterable[Point], colour: Colour) -> Shape:
    return lambda draw: draw.polygon(_scaled(points), fill=colour)


def _regular_polygon(corners: int, radius: float, turn: float, colour: Colour) -> Shape:
    """Return a regular polygon; `turn` is the angle of its first corner in degrees."""
    return _polygon([_polar(radius, turn + 360 * corner / corners) for corner in range(corners)], colour)


def _polar(radius: float, angle: float) -> Point:
    """Return the point at a distance and an angle in degrees from the centre."""
    return 50 + radius * math.cos(math.radians(angle)), 50 + radius * math.sin(math.radians(angle))


def _line(points: Iterable[Point], width: float, colour: Colour) -> Shape:
    return lambda draw: draw.line(_scaled(points), fill=colour, width=round(width * _UNIT), joint="curve")


def _text(text: str, size: float, colour: Colour) -> Shape:
    def draw_text(draw: ImageDraw.ImageDraw) -> None:
        centre, stroke = (50 * _UNIT, 50 * _UNIT), round(1.2 * _UNIT)
        font = ImageFont.load_default(size * _UNIT)
        draw.text(centre, text, fill=colour, font=font, anchor="mm", stroke_width=stroke, stroke_fill=colour)

    return draw_text


_RED_RING: list[Shape] = [_disc(48, _RED), _disc(37, _WHITE)]
_NO_PARKING: list[Shape] = [_disc(48, _RED), _disc(37, _BLUE), _line([(24, 24), (76, 76)], 10, _RED)]
_WARNING: list[Shape] = [_regular_polygon(3, 54, -90, _RED), _regular_polygon(3, 37, -90, _WHITE)]


def _arrow(turn: float) -> list[Shape]:
    """Return a white arrow on a blue disc; `turn` is its direction, 0 = right, 90 = down."""
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))

    def at(along: float, across: float) -> Point:
        return 50 + along * cos - across * sin, 50 + along * sin + across * cos

    shaft, head = [at(-32, 0), at(14, 0)], [at(34, 0), at(6, -21), at(6, 21)]
    return [_disc(48, _BLUE), _line(shaft, 11, _WHITE), _polygon(head, _WHITE)]


def _roundabout() -> list[Shape]:
    """Return three curved arrows on a blue disc."""
    shapes = [_disc(48, _BLUE)]
    for turn in (0.0, 120.0, 240.0):
        shapes.append(_line([_polar(24, turn + step) for step in range(0, 75, 15)], 9, _WHITE))
        shapes.append(_polygon([_polar(24, turn + 92), _polar(36, turn + 58), _polar(12, turn + 58)], _WHITE))
    return shapes


_SIGNS: dict[str, list[Shape]] = {
    **{f"speed limit {n}": [*_RED_RING, _text(f"{n}", 46, _BLACK)] for n in (20, 30, 50, 70, 80)},
    "speed limit 100": [*_RED_RING, _text("100", 34, _BLACK)],
    "end of limits": [_disc(48, _BLACK), _disc(44, _WHITE), _line([(78, 22), (22, 78)], 12, _BLACK)],
    "stop": [_regular_polygon(8, 49, 22.5, _WHITE), _regular_polygon(8, 46, 22.5, _RED), _text("STOP", 30, _WHITE)],
    "give way": [_regular_polygon(3, 54, 90, _RED), _regular_polygon(3, 33, 90, _WHITE)],
    "priority road": [_regular_polygon(4, 49, 0, _WHITE), _regular_polygon(4, 35, 0, _YELLOW)],
    "no entry": [_disc(48, _RED), _line([(20, 50), (80, 50)], 18, _WHITE)],
    "no vehicles": _RED_RING,
    "no parking": _NO_PARKING,
    "no stopping": [*_NO_PARKING, _line([(76, 24), (24, 76)], 10, _RED)],
    "turn left": _arrow(180),
    "turn right": _arrow(0),
    "straight ahead": _arrow(270),
    "roundabout": _roundabout(),
    "danger": [*_WARNING, _line([(50, 34), (50, 56)], 8, _BLACK), _disc(4.5, _BLACK, (50, 66))],
    "crossroads": [*_WARNING, _line([(50, 32), (50, 68)], 8, _BLACK), _line([(35, 54), (65, 54)], 8, _BLACK)],
    "bend left": [
        *_WARNING,
        _line([(58, 69), (58, 54), (42, 46)], 7, _BLACK),
        _polygon([(34, 42), (47, 38), (42, 53)], _BLACK),
    ],
    "bend right": [
        *_WARNING,
        _line([(42, 69), (42, 54), (58, 46)], 7, _BLACK),
        _polygon([(66, 42), (53, 38), (58, 53)], _BLACK),
    ],
}
"""The shapes of each sign, in drawing order."""


@cache
def _template(label: int) -> Image.Image:
    image = Image.new("RGBA", (_TEMPLATE_SIZE, _TEMPLATE_SIZE), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    for draw_shape in _SIGNS[CLASS_NAMES[label]]:
        draw_shape(draw)
    return image.reduce(2)  # close to what the camera sees, so that the bilinear placement below does not alias


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


def _eight_bits(pixels: np.ndarray) -> np.ndarray:
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)


def _noise(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a sensor at high gain with Gaussian noise."""
    return _eight_bits(image / 255 + rng.normal(0, 0.33, image.shape))


def _blur(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a lens out of focus."""
    radius = float(rng.uniform(0.9, 1.4))
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))


def _fog(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Add a bright veil of uneven density."""
    size = image.shape[0]
    coarse = Image.fromarray((rng.random((5, 5)) * 255).astype(np.uint8))
    density = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)) / 255
    veil = (0.35 + 0.2 * density)[..., None]
    return _eight_bits(image / 255 * (1 - veil) + 0.85 * veil)


def _dusk(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Darken with a bluish tint, and add sensor noise."""
    light = rng.uniform(0.36, 0.5) * np.array([0.8, 0.9, 1.2])
    return _eight_bits(image / 255 * light + rng.normal(0, 0.03, image.shape))


def _glare(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Simulate a low sun: overexposure and scattered light."""
    strength = rng.uniform(0.75, 1.0)
    return _eight_bits(image / 255 * (1 + strength) + 0.3 * strength)


CONDITIONS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "clear": lambda image, rng: image,
    "noise": _noise,
    "blur": _blur,
    "fog": _fog,
    "dusk": _dusk,
    "glare": _glare,
}
"""The conditions of the demo's drive, in order."""
