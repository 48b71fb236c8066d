"""Snow, frost, fog and spatter on the lens, drawn at the reference size (see `filters`); signature as in `noise`."""

from __future__ import annotations

import numpy as np

from remtta.corruptions import filters
from remtta.corruptions.filters import Array, cv2
from remtta.corruptions.ice import NUM_TEXTURES, ice_texture

_WATER = np.array([175, 238, 238], dtype=np.float32) / 255  # pale turquoise
_MUD = np.array([63, 42, 20], dtype=np.float32) / 255
_MUD_THRESHOLD = 0.8
_EDGES = (50, 150)  # of the water: Canny's two thresholds, in 8-bit values
_FAR_FROM_EDGES = 20  # pixels; distances are capped here
_LONGEST_CLOUD = 4  # short sides; in a longer panorama the cloud repeats
_EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float32)


def snow(
    image: Array,
    rng: np.random.Generator,
    scale: float,
    *,
    mean: float,
    std: float,
    zoom: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Array:
    """Whiten the scene and add falling flakes, blurred along their motion."""
    flakes = rng.normal(mean, std, filters.canvas_shape(image, scale)).astype(np.float32)
    flakes = filters.zoomed(flakes, zoom)
    flakes = np.where(flakes < threshold, np.float32(0), flakes.clip(0, 1))
    flakes = filters.fit(filters.motion(flakes, radius, sigma, rng.uniform(-135, -45)), image)
    luma = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    white = np.maximum(image, 1.5 * luma + np.float32(0.5))
    scene = np.float32(keep) * image + np.float32(1 - keep) * white
    return scene + (flakes + flakes[::-1, ::-1])[..., None]


def frost(image: Array, rng: np.random.Generator, scale: float, *, keep: float, ice: float) -> Array:
    """Blend in ice on the pane: a random crop of one of the generated textures."""
    height, width = filters.canvas_shape(image, scale)
    texture = ice_texture(int(rng.integers(NUM_TEXTURES)), min(height, width))
    top, left = rng.integers(len(texture), size=2)
    crop = filters.fit(_tiled(texture, height, width, int(top), int(left)), image)
    return np.float32(keep) * image + np.float32(ice) * crop


def _tiled(texture: Array, height: int, width: int, top: int = 0, left: int = 0) -> Array:
    """Return a piece of any size out of a seamless square texture."""
    rows, columns = (top + np.arange(height)) % len(texture), (left + np.arange(width)) % len(texture)
    return texture[rows[:, None], columns]


def fog(image: Array, rng: np.random.Generator, scale: float, *, amount: float, decay: float) -> Array:
    """Add a plasma cloud, and darken the result so that its maximum stays the same."""
    height, width = filters.canvas_shape(image, scale)
    cloud = plasma(min(max(height, width), _LONGEST_CLOUD * min(height, width)), decay, rng)
    cloud = filters.fit(_tiled(cloud, height, width), image)
    brightest = float(image.max())
    return (image + np.float32(amount) * cloud[..., None]) * np.float32(brightest / (brightest + amount))


def plasma(size: int, decay: float, rng: np.random.Generator) -> Array:
    """Return a seamless diamond-square fractal (N, N) in [0, 1], with N the next power of two from `size` on.

    The amplitude falls by decay squared with each halving of the grid; a high decay makes smooth clouds.
    """
    grid, reach = np.zeros((1, 1), dtype=np.float32), 1.0
    while grid.shape[0] < max(size, 2):
        grid = _refined(grid, np.float32(reach), rng)
        reach /= decay**2
    grid -= grid.min()
    return grid / max(grid.max(), np.finfo(np.float32).tiny)


def _refined(grid: Array, reach: np.float32, rng: np.random.Generator) -> Array:
    """Double the rows and columns: first the centres of the squares, then the midpoints of their sides."""

    def displaced(*neighbours: Array) -> Array:
        draw = rng.random(grid.shape, dtype=np.float32) * 2 - 1
        return sum(neighbours[1:], neighbours[0]) / 4 + reach * draw

    right, below = np.roll(grid, -1, axis=1), np.roll(grid, -1, axis=0)
    centres = displaced(grid, right, below, np.roll(right, -1, axis=0))
    finer = np.empty((2 * grid.shape[0], 2 * grid.shape[1]), dtype=np.float32)
    finer[::2, ::2] = grid
    finer[1::2, 1::2] = centres
    finer[::2, 1::2] = displaced(grid, right, centres, np.roll(centres, 1, axis=0))
    finer[1::2, ::2] = displaced(grid, below, centres, np.roll(centres, 1, axis=1))
    return finer


def spatter(
    image: Array,
    rng: np.random.Generator,
    scale: float,
    *,
    mean: float,
    std: float,
    sigma: float,
    threshold: float,
    strength: float,
    mud: float,
) -> Array:
    """Spatter the lens with water or mud."""
    liquid = rng.normal(mean, std, filters.canvas_shape(image, scale)).astype(np.float32)
    liquid = filters.gaussian(liquid, sigma)
    liquid[liquid < threshold] = 0
    if not mud:
        return image + filters.fit(_water(liquid, strength), image)[..., None] * _WATER
    drops = filters.gaussian((liquid > 0).astype(np.float32), strength)
    drops[drops < _MUD_THRESHOLD] = 0
    cover = filters.fit(drops, image)[..., None]
    return image * (1 - cover) + cover * _MUD


def _water(liquid: Array, strength: float) -> Array:
    """Return light and shade of the drops, embossed by the distance to their edges; `strength` at the brightest."""
    edges = cv2.Canny(np.rint(liquid.clip(0, 1) * 255).astype(np.uint8), *_EDGES)
    distance = cv2.distanceTransform(255 - edges, cv2.DIST_L2, 5).clip(0, _FAR_FROM_EDGES)
    relief = cv2.equalizeHist(cv2.blur(distance, (3, 3)).astype(np.uint8))
    shaded = cv2.blur(cv2.filter2D(relief, cv2.CV_8U, _EMBOSS), (3, 3))
    light = liquid * shaded
    return (light * np.float32(strength) / max(light.max(), np.finfo(np.float32).tiny)).astype(np.float32)
