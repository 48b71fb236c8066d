"""Which function makes which corruption."""

from __future__ import annotations

from collections.abc import Callable

from remtta.corruptions.blur import defocus_blur, gaussian_blur, glass_blur, motion_blur, zoom_blur
from remtta.corruptions.digital import brightness, contrast, elastic_transform, jpeg_compression, pixelate, saturate
from remtta.corruptions.filters import Array
from remtta.corruptions.noise import gaussian_noise, impulse_noise, shot_noise, speckle_noise
from remtta.corruptions.weather import fog, frost, snow, spatter

FUNCTIONS: dict[str, Callable[..., Array]] = {
    function.__name__: function
    for function in (
        gaussian_noise,
        shot_noise,
        impulse_noise,
        defocus_blur,
        glass_blur,
        motion_blur,
        zoom_blur,
        snow,
        frost,
        fog,
        brightness,
        contrast,
        elastic_transform,
        pixelate,
        jpeg_compression,
        speckle_noise,
        spatter,
        gaussian_blur,
        saturate,
    )
}
"""By name: (image, rng, scale, **parameters) to the corrupted image; see `noise`."""
