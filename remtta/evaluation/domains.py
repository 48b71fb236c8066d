"""Labelled images of one condition, and the order in which the field visits conditions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.errors import UsageError
from remtta.streams.images import load_image, natural_key

STANDARD = (
    *("gaussian_noise", "shot_noise", "impulse_noise"),
    *("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness"),
    *("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
"""ImageNet-C's fifteen corruptions, in the order of every table (Hendrycks and Dietterich, 2019)."""

HOLD_OUTS = ("speckle_noise", "spatter", "gaussian_blur", "saturate")
"""The four more that are there to choose settings on; not evaluated unless named."""

THREE_D = (
    *("near_focus", "far_focus", "color_quant", "iso_noise", "low_light", "flash"),
    *("fog_3d", "bit_error", "h265_abr", "h265_crf", "xy_motion_blur", "z_motion_blur"),
)
"""ImageNet-3DCC's corruptions."""

SEVERITIES = (1, 2, 3, 4, 5)
DEFAULT_SEVERITY = 5

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Domain:
    """Labelled images of one condition.

    Attributes:
        name: Such as "gaussian_noise".
        severity: 1 to 5, or None where there is no such level.
        sources: A path, or array and row, per image.
        labels: The model's class number per image.
        load: Decode the image at a position to RGB; raises `FrameError`.
    """

    name: str
    severity: int | None
    sources: Sequence[str]
    labels: np.ndarray
    load: Callable[[int], Image.Image]

    @property
    def title(self) -> str:
        """Name and severity, as the field prints them: "gaussian_noise5"."""
        return title_of(self.name, self.severity)


def load_at(sources: Sequence[str], position: int) -> Image.Image:
    """Decode the image file at a position.

    Raises:
        FrameError: If it cannot be decoded.
    """
    return load_image(Path(sources[position]))


def title_of(name: str, severity: int | None) -> str:
    """A domain's name and severity in one."""
    return f"{name}{severity or ''}"


def default_order(names: Iterable[str], all_: bool = False) -> list[str]:
    """Domains in the field's order: the standard ones, ImageNet-3DCC's, then any others by name.

    The hold-outs stay out where standard ones are there, unless `all_`.
    """
    known = (*STANDARD, *THREE_D)
    present = set(names)
    others = sorted(present - set(known) - set(HOLD_OUTS), key=natural_key)
    ordered = [name for name in known if name in present] + others
    hold_outs = [name for name in HOLD_OUTS if name in present]
    return ordered + hold_outs if all_ or not ordered else ordered


def wanted_domains(
    root: Path, found: Collection[str], domains: Sequence[str] | None, *, complete: bool, by_severity: bool
) -> list[str]:
    """The domains to evaluate: those asked for, which must be there, or the default ones.

    Args:
        root: Where they were looked for.
        found: Those that are there.
        domains: Those asked for.
        complete: Where some of the fifteen standard corruptions are there, all must be, unless `domains` names some.
        by_severity: Whether they have severities; without, it is somebody's own tree that has a fog, too.

    Raises:
        UsageError: If some are not there.
    """
    if not domains:
        absent = [name for name in STANDARD if name not in found]
        is_partial = 0 < len(absent) < len(STANDARD)
        if not (is_partial and complete):
            if is_partial and by_severity:
                _log.warning(
                    "%d of the 15 standard corruptions are not in %s: %s", len(absent), root, ", ".join(absent)
                )
            return default_order(found)
        domains = STANDARD
    missing = [name for name in domains if name not in found]
    if missing:
        raise UsageError(
            f"{root} has no domain {', '.join(missing)}; it has {', '.join(default_order(found, all_=True))}; "
            "name the ones to evaluate with --domains"
        )
    return list(domains)
