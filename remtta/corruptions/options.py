"""How a folder of images is corrupted. Imports no numpy, so that `--help` is fast."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from remtta.corruptions.parameters import CORRUPTIONS, HOLD_OUTS, SEVERITIES, STANDARD, ParameterSet

Parameters = Literal["auto", "imagenet", "cifar"]
Format = Literal["auto", "jpeg", "png"]
Engine = Literal["processes", "ray"]

JPEG_QUALITY = 85
"""Of the files, as in ImageNet-C."""

_GROUPS = {"all": CORRUPTIONS, "standard": STANDARD, "hold-out": HOLD_OUTS}


@dataclass(frozen=True)
class CorruptOptions:
    """What is made of each image.

    Attributes:
        corruptions: Names, each made once, in the standard order.
        severities: 1 to 5.
        seed: With a file's corruption, severity and path below the source, it decides every random choice.
        size: First resize the short side to 256/224 of this and cut out the centre, this many pixels high and wide,
            as in ImageNet-C; None keeps every image as it is.
        parameters: "imagenet" or "cifar"; "auto" is CIFAR-10-C's for images with a short side of up to 64 px.
        format: "jpeg" (quality 85, as in ImageNet-C) or "png" (lossless, as CIFAR-10-C is); "auto" goes with the
            parameters.
        limit: Take the first so many images of every class, in natural order; None for all.
        jobs: Processes; None for one per core.
        engine: "processes" of this machine, or "ray": those of a cluster.
        overwrite: Remove a tree made earlier in the same place.

    Raises:
        ValueError: If a value is out of range; the text names it.
    """

    corruptions: tuple[str, ...] = STANDARD
    severities: tuple[int, ...] = (5,)
    seed: int = 0
    size: int | None = None
    parameters: Parameters = "auto"
    format: Format = "auto"
    limit: int | None = None
    jobs: int | None = None
    engine: Engine = "processes"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in self.corruptions:
            if name not in CORRUPTIONS:
                raise ValueError(f"no corruption {name!r}{_near(name)}; there are {', '.join(CORRUPTIONS)}")
        for severity in self.severities:
            if severity not in SEVERITIES:
                raise ValueError(f"severity must be 1 to 5, got {severity}")
        for field in ("corruptions", "severities"):
            if not getattr(self, field):
                raise ValueError(f"{field} must name at least one")
        for field in ("size", "limit", "jobs"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be >= 1, got {value}")
        object.__setattr__(self, "corruptions", tuple(name for name in CORRUPTIONS if name in self.corruptions))
        object.__setattr__(self, "severities", tuple(sorted(set(self.severities))))

    @property
    def parameter_set(self) -> ParameterSet | None:
        """The parameters of every image, or None where its size decides."""
        return None if self.parameters == "auto" else self.parameters


def parse_corruptions(text: str) -> tuple[str, ...]:
    """Names or groups ("all", "standard", "hold-out") with commas between them, to names."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(name for part in parts for name in _GROUPS.get(part, (part,)))


def parse_severities(text: str) -> tuple[int, ...]:
    """`5` or `1,3,5` to numbers.

    Raises:
        ValueError: If one is no whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"severity takes numbers from 1 to 5 with commas between them, got {text!r}") from None


def _near(name: str) -> str:
    close = difflib.get_close_matches(name, [*CORRUPTIONS, *_GROUPS], n=1)
    return f", did you mean {close[0]}" if close else ""
