"""The 15 standard and 4 hold-out corruptions of ImageNet-C and CIFAR-10-C, written from their description.

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019.

A corruption is a function in `blur`, `weather` or `digital`. It takes a float32 image of shape (H, W, 3) in [0, 1], a
random generator, the image's size relative to the reference size (`scale`), and its own parameters. It leaves the input
unchanged and may return values outside [0, 1], which are clipped afterwards.

Importing this package loads no numpy; `corrupt` does, when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from remtta.errors import check, unknown
from remtta.lab.corruptions.parameters import (
    CORRUPTIONS,
    HOLD_OUTS,
    PARAMETERS,
    REFERENCE_SIZE,
    SEVERITIES,
    STANDARD,
    ParameterSet,
    parameter_set_of,
    parts_of,
)

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

__all__ = ["CORRUPTIONS", "HOLD_OUTS", "SEVERITIES", "STANDARD", "corrupt"]


def corrupt(
    image: Image.Image, name: str, severity: int, rng: np.random.Generator, parameter_set: ParameterSet | None = None
) -> Image.Image:
    """Corrupt an image.

    Args:
        image: RGB, of any size. Lengths in pixels grow with its short side: they hold as published at 224 px
            (ImageNet-C's) or 32 px (CIFAR-10-C's).
        name: One of CORRUPTIONS, or several with "+" between them, applied in this order at the same severity.
        severity: 1 to 5.
        rng: Source of every random choice; the same state makes the same image.
        parameter_set: "imagenet" or "cifar"; by default CIFAR-10-C's for a short side of up to 64 px.

    Returns:
        A new RGB image of the same size.

    Raises:
        UsageError: If there is no such corruption or severity, or the image is not RGB or too long.
        RemttaError: If OpenCV cannot be loaded.

    Source: Hendrycks and Dietterich, 2019.
    """
    for part in parts_of(name):
        if part not in PARAMETERS:
            raise unknown("corruption", part, CORRUPTIONS)
    check(severity in SEVERITIES, "severity", severity, "1 to 5")
    check(image.mode == "RGB", "image", image.mode, "RGB (see PIL.Image.Image.convert)")
    from remtta.lab.corruptions.blur import MAX_SIDE
    from remtta.lab.corruptions.digital import to_float, to_image

    check(max(image.size) <= MAX_SIDE, "image", f"{image.width}x{image.height}", f"at most {MAX_SIDE} pixels a side")
    short_side = min(image.size)
    chosen = parameter_set or parameter_set_of(short_side)
    scale = short_side / REFERENCE_SIZE[chosen]
    for part in parts_of(name):
        values = PARAMETERS[part].values(severity, chosen)
        image = to_image(function_of(part)(to_float(image), rng, scale, **values))
    return image


def function_of(name: str) -> Callable[..., np.ndarray]:
    """Return the function (image, rng, scale, **parameters) of this name."""
    from remtta.lab.corruptions import blur, digital, weather

    return {**vars(blur), **vars(weather), **vars(digital)}[name]
