"""The published parameters of the 19 corruptions. Imports no numpy, so that the command line starts fast.

Source: the figures of ImageNet-C and CIFAR-10-C, Hendrycks and Dietterich, "Benchmarking Neural Network
Robustness to Common Corruptions and Perturbations", ICLR 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParameterSet = Literal["imagenet", "cifar"]
"""ImageNet-C's parameters, made for 224 px, or CIFAR-10-C's, made for 32 px."""

REFERENCE_SIZE: dict[ParameterSet, int] = {"imagenet": 224, "cifar": 32}
"""Short side, in pixels, for which a set's lengths were published."""

CIFAR_UP_TO = 64
"""Images whose short side is at most this many pixels get CIFAR-10-C's parameters by default."""

SEVERITIES = (1, 2, 3, 4, 5)

_Values = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Parameters:
    """The parameters of one corruption: their names, and their values for severity 1 to 5 in each set."""

    fields: tuple[str, ...]
    imagenet: _Values
    cifar: _Values

    def values(self, severity: int, parameter_set: ParameterSet) -> dict[str, float]:
        """Return the value of each field at one severity (1 to 5)."""
        rows = self.imagenet if parameter_set == "imagenet" else self.cifar
        return dict(zip(self.fields, rows[severity - 1], strict=True))


def _one(field: str, imagenet: tuple[float, ...], cifar: tuple[float, ...]) -> Parameters:
    return Parameters((field,), tuple((value,) for value in imagenet), tuple((value,) for value in cifar))


PARAMETERS: dict[str, Parameters] = {
    "gaussian_noise": _one("std", (0.08, 0.12, 0.18, 0.26, 0.38), (0.04, 0.06, 0.08, 0.09, 0.10)),
    "shot_noise": _one("photons", (60, 25, 12, 5, 3), (500, 250, 100, 75, 50)),
    "impulse_noise": _one("share", (0.03, 0.06, 0.09, 0.17, 0.27), (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": Parameters(
        ("radius", "sigma"),
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    "glass_blur": Parameters(
        ("sigma", "distance", "passes"),
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": Parameters(
        ("radius", "sigma"),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    ),
    "zoom_blur": Parameters(
        ("zoom", "step"),
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    ),
    "snow": Parameters(
        ("mean", "std", "zoom", "threshold", "radius", "sigma", "keep"),
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    "frost": Parameters(
        ("keep", "ice"),
        ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
    ),
    "fog": Parameters(
        ("amount", "decay"),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    ),
    "brightness": _one("added", (0.1, 0.2, 0.3, 0.4, 0.5), (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": _one("factor", (0.4, 0.3, 0.2, 0.1, 0.05), (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": Parameters(
        ("strength", "sigma", "shift"),
        ((488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88)),
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96)),
    ),
    "pixelate": _one("fraction", (0.6, 0.5, 0.4, 0.3, 0.25), (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": _one("quality", (25, 18, 15, 10, 7), (80, 65, 58, 50, 40)),
    "speckle_noise": _one("std", (0.15, 0.2, 0.35, 0.45, 0.6), (0.06, 0.1, 0.12, 0.16, 0.2)),
    "spatter": Parameters(
        ("mean", "std", "sigma", "threshold", "strength", "mud"),
        (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
    ),
    "gaussian_blur": _one("sigma", (1, 2, 3, 4, 6), (0.4, 0.6, 0.7, 0.8, 1)),
    "saturate": Parameters(
        ("factor", "added"),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    ),
}

_NUM_STANDARD = 15

STANDARD = tuple(PARAMETERS)[:_NUM_STANDARD]
"""The 15 corruptions over which the benchmark averages, in the standard order."""

HOLD_OUTS = tuple(PARAMETERS)[_NUM_STANDARD:]
"""The 4 corruptions reserved for choosing settings, so that the 15 stay unseen."""

CORRUPTIONS = STANDARD + HOLD_OUTS


def parameter_set_of(short_side: int) -> ParameterSet:
    """Return the parameter set for images with this short side in pixels."""
    return "cifar" if short_side <= CIFAR_UP_TO else "imagenet"


def parts_of(name: str) -> list[str]:
    """Return the parts of a combination: ["fog", "snow"] for "fog+snow", ["fog"] for "fog"."""
    return name.split("+")
