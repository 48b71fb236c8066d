"""Snow, frost, fog and spatter on the lens; and the canvas on which random layers are drawn.

Random layers (H, W) of flakes, drops, fog, ice and displacements are drawn on a canvas whose short side is the
reference size of the parameters, 224 or 32 px, and then resized to the image. They therefore look alike at every size,
and nothing is resized if the image has the reference size.

Ice is drawn by code, in place of the benchmark's photographs of frost: a bluish white on dark, of a haze of uneven
density, a network of ridges between crystals, and feathers that branch at 60 degrees as ice does.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from remtta.lab.corruptions.blur import Array, cv2, gaussian_filter, motion_filter, zoomed

_WATER = np.array([175, 238, 238], dtype=np.float32) / 255  # pale turquoise
_MUD = np.array([63, 42, 20], dtype=np.float32) / 255
_MUD_THRESHOLD = 0.8
_CANNY_THRESHOLDS = (50, 150)  # of the water's edges, in 8-bit values
_MAX_EDGE_DISTANCE = 20  # pixels
_MAX_CLOUD_SIDES = 4  # short sides; in a longer panorama the cloud repeats
_EMBOSS = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float32)

NUM_TEXTURES = 5  # of ice; the caller's generator chooses among them and positions the crop
_TEXTURE_SEED = 20190507
_TEXTURE_SIZE, _TEXTURE_FOR = 512, 224  # pixels, for images of this short side
_NUM_FEATHERS = 44
_ICE_SHADOW = np.array([0.05, 0.08, 0.13], dtype=np.float32)
_ICE_LIGHT = np.array([0.90, 0.97, 1.00], dtype=np.float32)


def canvas_shape(image: Array, scale: float) -> tuple[int, int]:
    """Return the height and width of the canvas for an image `scale` times the reference size."""
    height, width = image.shape[:2]
    return max(1, round(height / scale)), max(1, round(width / scale))


def resized_to(layer: Array, image: Array) -> Array:
    """Resize a layer to the height and width of an image: linearly to enlarge, by area to reduce."""
    height, width = image.shape[:2]
    if layer.shape[:2] == (height, width):
        return layer
    smaller = height * width < layer.shape[0] * layer.shape[1]
    return cv2.resize(layer, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR)


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
    flakes = rng.normal(mean, std, canvas_shape(image, scale)).astype(np.float32)
    flakes = zoomed(flakes, zoom)
    flakes = np.where(flakes < threshold, np.float32(0), flakes.clip(0, 1))
    flakes = resized_to(motion_filter(flakes, radius, sigma, rng.uniform(-135, -45)), image)
    luma = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[..., None]
    white = np.maximum(image, 1.5 * luma + np.float32(0.5))
    scene = np.float32(keep) * image + np.float32(1 - keep) * white
    return scene + (flakes + flakes[::-1, ::-1])[..., None]


def frost(image: Array, rng: np.random.Generator, scale: float, *, keep: float, ice: float) -> Array:
    """Blend in ice on the pane: a random crop of one of the generated textures."""
    height, width = canvas_shape(image, scale)
    texture = ice_texture(int(rng.integers(NUM_TEXTURES)), min(height, width))
    top, left = rng.integers(len(texture), size=2)
    crop = resized_to(_tiled(texture, height, width, int(top), int(left)), image)
    return np.float32(keep) * image + np.float32(ice) * crop


def _tiled(texture: Array, height: int, width: int, top: int = 0, left: int = 0) -> Array:
    """Return a piece of any size out of a seamless square texture."""
    rows, columns = (top + np.arange(height)) % len(texture), (left + np.arange(width)) % len(texture)
    return texture[rows[:, None], columns]


def fog(image: Array, rng: np.random.Generator, scale: float, *, amount: float, decay: float) -> Array:
    """Add a plasma cloud, and darken the result so that its maximum stays the same."""
    height, width = canvas_shape(image, scale)
    cloud = plasma(min(max(height, width), _MAX_CLOUD_SIDES * min(height, width)), decay, rng)
    cloud = resized_to(_tiled(cloud, height, width), image)
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
    liquid = rng.normal(mean, std, canvas_shape(image, scale)).astype(np.float32)
    liquid = gaussian_filter(liquid, sigma)
    liquid[liquid < threshold] = 0
    if not mud:
        return image + resized_to(_water(liquid, strength), image)[..., None] * _WATER
    drops = gaussian_filter((liquid > 0).astype(np.float32), strength)
    drops[drops < _MUD_THRESHOLD] = 0
    cover = resized_to(drops, image)[..., None]
    return image * (1 - cover) + cover * _MUD


def _water(liquid: Array, strength: float) -> Array:
    """Return light and shade of the drops, embossed by the distance to their edges; `strength` at the brightest."""
    edges = cv2.Canny(np.rint(liquid.clip(0, 1) * 255).astype(np.uint8), *_CANNY_THRESHOLDS)
    distance = cv2.distanceTransform(255 - edges, cv2.DIST_L2, 5).clip(0, _MAX_EDGE_DISTANCE)
    relief = cv2.equalizeHist(cv2.blur(distance, (3, 3)).astype(np.uint8))
    shaded = cv2.blur(cv2.filter2D(relief, cv2.CV_8U, _EMBOSS), (3, 3))
    light = liquid * shaded
    return (light * np.float32(strength) / max(light.max(), np.finfo(np.float32).tiny)).astype(np.float32)


@lru_cache(maxsize=2 * NUM_TEXTURES)
def ice_texture(number: int, short_side: int) -> Array:
    """Return a texture (N, N, 3), RGB in [0, 1], by its number below NUM_TEXTURES.

    N is a little over twice the images' short side in pixels. The array is cached and read-only.
    """
    side = round(_TEXTURE_SIZE * short_side / _TEXTURE_FOR)
    texture: Array = cv2.resize(_draw_texture(number), (side, side), interpolation=cv2.INTER_AREA)
    texture.flags.writeable = False
    return texture


@lru_cache(maxsize=NUM_TEXTURES)
def _draw_texture(number: int) -> Array:
    rng = np.random.default_rng([_TEXTURE_SEED, number])
    noise = _periodic_noise(rng, 2.2)
    low, high = np.quantile(noise, (0.02, 0.98))
    haze = ((noise - low) / (high - low)).clip(0, 1).astype(np.float32)
    ridges = sum(_ridges(rng, wavelength) * weight for wavelength, weight in ((48, 0.2), (20, 0.25), (9, 0.25)))
    feathers = _feathers(rng)
    height = 0.5 * haze**1.5 + 1.2 * haze * ridges + (0.35 + 0.7 * haze) * feathers
    sparkle = 0.04 * haze * rng.standard_normal(height.shape, dtype=np.float32)
    density = (height + sparkle).clip(0, 1)[..., None].astype(np.float32)
    return _ICE_SHADOW + density * (_ICE_LIGHT - _ICE_SHADOW)


def _periodic_noise(rng: np.random.Generator, slope: float, shortest: float = 2.0, longest: float = 400.0) -> Array:
    """Return noise with amplitude proportional to frequency**-slope, within a band of wavelengths in pixels."""
    spectrum = np.fft.rfft2(rng.standard_normal((_TEXTURE_SIZE, _TEXTURE_SIZE)))
    frequency = np.hypot(np.fft.fftfreq(_TEXTURE_SIZE)[:, None], np.fft.rfftfreq(_TEXTURE_SIZE))
    frequency[0, 0] = 1
    band = (frequency >= 1 / longest) & (frequency <= 1 / shortest)
    noise = np.fft.irfft2(spectrum * np.where(band, frequency**-slope, 0), (_TEXTURE_SIZE, _TEXTURE_SIZE))
    return (noise / noise.std()).astype(np.float32)


def _ridges(rng: np.random.Generator, wavelength: float) -> Array:
    """Return thin bright lines at the zero crossings of smooth noise, like borders between crystals."""
    noise = _periodic_noise(rng, 1.0, shortest=wavelength / 2, longest=2 * wavelength)
    return np.exp(-np.abs(noise) * 4).astype(np.float32)


def _feathers(rng: np.random.Generator) -> Array:
    tiles = np.zeros((_TEXTURE_SIZE, _TEXTURE_SIZE), dtype=np.float32)
    for _ in range(_NUM_FEATHERS):
        feather = _feather(rng, length=float(rng.uniform(40, 170)))
        top, left = rng.integers(_TEXTURE_SIZE, size=2)
        tiles = np.maximum(tiles, np.roll(feather, (top, left), axis=(0, 1)))
    return tiles


def _feather(rng: np.random.Generator, length: float) -> Array:
    """Return one feather growing from the middle of the tile: a stem with two levels of branches."""
    tile = np.zeros((_TEXTURE_SIZE, _TEXTURE_SIZE), dtype=np.uint8)
    middle = _TEXTURE_SIZE / 2
    _draw_branches(tile, rng, middle, middle, float(rng.uniform(0, 2 * math.pi)), length, level=0)
    sharp = tile.astype(np.float32) / 255
    return 0.7 * sharp + 0.6 * cv2.GaussianBlur(sharp, (0, 0), 2.0)


def _draw_branches(
    tile: np.ndarray, rng: np.random.Generator, x: float, y: float, heading: float, length: float, level: int
) -> None:
    """Draw a slightly bent stem in short steps, with branches on both sides."""
    bend = float(rng.normal(0, 0.012))
    step = (6.0, 4.0, 3.0)[level]
    num_steps = int(length / step)
    for number in range(num_steps):
        heading += bend + float(rng.normal(0, 0.04))
        next_x, next_y = x + step * math.cos(heading), y + step * math.sin(heading)
        light = (255, 215, 170)[level] * (1 - 0.5 * number / num_steps)
        ends = [(round(16 * a), round(16 * b)) for a, b in ((x, y), (next_x, next_y))]
        cv2.line(tile, *ends, int(light), 1, cv2.LINE_AA, 4)
        x, y = next_x, next_y
        if level < 2 and number:
            reach = (0.45, 0.4)[level] * length * (1 - number / num_steps) * float(rng.uniform(0.5, 1.1))
            for side in (-1, 1):
                turn = math.radians(60) + float(rng.normal(0, 0.08))
                _draw_branches(tile, rng, x, y, heading + side * turn, reach, level + 1)
