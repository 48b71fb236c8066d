"""Options of `remtta corrupt`. Imports no numpy, so that `--help` is fast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from remtta.errors import UsageError, unknown
from remtta.lab.corruptions.parameters import CIFAR_UP_TO, CORRUPTIONS, HOLD_OUTS, STANDARD, ParameterSet, parts_of
from remtta.options.option import Option, check_options
from remtta.options.run_options import Engine

Parameters = Literal["auto", "imagenet", "cifar"]
Format = Literal["auto", "jpeg", "png"]

JPEG_QUALITY = 85
"""JPEG quality of the files, as in ImageNet-C."""

_GROUPS = {"all": CORRUPTIONS, "standard": STANDARD, "hold-out": HOLD_OUTS}

_DARK = ("dark", "dim", "dusk", "low_light", "lowlight", "night")


@dataclass(frozen=True)
class CorruptOptions:
    """The corruptions to apply to each image, and the format of the files.

    `seed` together with a file's corruption, severity and path below the source determines every random choice.
    Corruptions and severities are sorted into their standard order and deduplicated; combinations such as fog+snow come
    last. Raise UsageError if a value is out of range; the message names it.
    """

    severities: Annotated[
        tuple[int, ...], Option("Severities, 1 to 5, separated by commas.", flags=("--severity", "-s"), min=1, max=5)
    ] = (5,)
    corruptions: Annotated[
        tuple[str, ...],
        Option(
            "standard (15), hold-out (4), all, or names separated by commas; fog+snow applies fog, then snow.",
            flags=("--corruptions", "-c"),
            default="standard",
            read=parse_corruptions,
            more="corruptions.md",
        ),
    ] = STANDARD
    size: Annotated[
        int | None,
        Option(
            "Resize the short side to 256/224 of N and crop the center, N x N.",
            metavar="N",
            min=1,
            max=10_000,
            default="unchanged",
        ),
    ] = None
    parameters: Annotated[
        Parameters, Option(f"Parameters of ImageNet-C or CIFAR-10-C; auto: CIFAR-10-C's up to {CIFAR_UP_TO} px.")
    ] = "auto"
    format: Annotated[
        Format, Option("File format; auto: PNG with CIFAR-10-C's parameters, else JPEG of quality 85.")
    ] = "auto"
    limit: Annotated[int | None, Option("Only the first N images of each class.", metavar="N", min=1)] = None
    jobs: Annotated[
        int | None, Option("Number of processes.", flags=("--jobs", "-j"), min=1, default="one per core")
    ] = None
    engine: Annotated[
        Engine, Option("Local processes, or Ray workers.", more="scale.md#tables-and-corruptions-on-many-cores")
    ] = "processes"
    overwrite: Annotated[bool, Option("Replace an earlier tree in DST, instead of adding to it.")] = False
    seed: Annotated[int, Option("Seed of every random choice.", min=0)] = 0

    def __post_init__(self) -> None:
        for name in (part for combined in self.corruptions for part in parts_of(combined)):
            if any(word in name.lower() for word in _DARK):
                raise UsageError(
                    f'unknown corruption "{name}"; none darkens images, but docs/corruptions.md tells how to make dusk'
                )
            if name not in CORRUPTIONS:
                raise unknown("corruption", name, [*CORRUPTIONS, *_GROUPS])
        check_options(self)
        for field in ("corruptions", "severities"):
            if not getattr(self, field):
                raise UsageError(f"{field} must name at least one")
        object.__setattr__(self, "corruptions", tuple(in_standard_order(self.corruptions)))
        object.__setattr__(self, "severities", tuple(sorted(set(self.severities))))

    @property
    def parameter_set(self) -> ParameterSet | None:
        """The parameter set of every image; None if each image's size decides."""
        return None if self.parameters == "auto" else self.parameters


def parse_corruptions(text: str) -> tuple[str, ...]:
    """Return the corruption names for comma-separated names and groups ("all", "standard", "hold-out")."""
    return tuple(name for part in text.split(",") for name in _GROUPS.get(part.strip(), (part.strip(),)))


def in_standard_order(names: Iterable[str]) -> list[str]:
    """Return distinct names: single corruptions in their standard order, then combinations as they came."""
    order = {name: position for position, name in enumerate(CORRUPTIONS)}
    return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))
