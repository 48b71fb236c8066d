"""Labelled images, domain by domain, and the order in which the field visits domains."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.errors import UsageError, counted
from remtta.streams.images import load_image, natural_key
from remtta.streams.pillow import opened

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

Sizes = Mapping[tuple[int, int], int]
"""How many images there are of each width and height."""

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Domain:
    """Labelled images of one condition.

    Attributes:
        name: Such as "gaussian_noise".
        severity: 1 to 5, or None where there is no such level.
        sources: A path, or array and row, per image.
        labels: The model's class number per image.
        read: Decodes the image at a position; None where sources are image files.
    """

    name: str
    severity: int | None
    sources: Sequence[str]
    labels: np.ndarray
    read: Callable[[int], Image.Image] | None = None

    @property
    def title(self) -> str:
        """Name and severity, as the field prints them: "gaussian_noise5"."""
        return title_of(self.name, self.severity)

    def load(self, position: int) -> Image.Image:
        """Decode the image at a position to RGB.

        Raises:
            FrameError: If it cannot be decoded.
        """
        return self.read(position) if self.read else load_image(Path(self.sources[position]))


@dataclass(frozen=True)
class Dataset:
    """Domains to evaluate on.

    Attributes:
        root: Where they are.
        layout: What was found there, for people.
        domains: In the order of the evaluation.
        classes: How class folders became numbers.
        class_numbers: The model's class numbers that there are folders or labels of, ascending; all of them, whatever
            images a limit or a list leaves.
        sizes: Of the images.
        names: Names of the model's classes, where they are the folders' in alphabetical order, else None.
        restricted_to: Name of the ImageNet variant whose logits are restricted to its classes, or None.
        shuffled: Whether the order on disk is by class, so that it has to be shuffled.
    """

    root: Path
    layout: str
    domains: Sequence[Domain]
    classes: str
    class_numbers: Sequence[int]
    sizes: Sizes
    names: Sequence[str] | None = None
    restricted_to: str | None = None
    shuffled: bool = False

    def report(self) -> str:
        """One line: what was found."""
        images = sum(len(domain.sources) for domain in self.domains)
        size = "{}x{} pixels".format(*next(iter(self.sizes))) if len(self.sizes) == 1 else "various sizes"
        restricted = f", logits restricted to {self.restricted_to}'s" if self.restricted_to else ""
        return (
            f"{self.root}: {self.layout}, {counted(len(self.domains), 'domain')}, {counted(images, 'image')}, {size}, "
            f"{len(self.class_numbers)} classes by {self.classes}{restricted}"
        )


def title_of(name: str, severity: int | None) -> str:
    """A domain's name and severity in one."""
    return f"{name}{severity or ''}"


def image_sizes(paths: Sequence[str]) -> Counter[tuple[int, int]]:
    """How many images there are of each width and height, by their headers; unreadable ones are passed over."""
    with ThreadPoolExecutor() as pool:
        return Counter(size for size in pool.map(_image_size, paths, chunksize=64) if size)


def _image_size(path: str) -> tuple[int, int] | None:
    try:
        with opened(Path(path)) as image:
            return image.size[:2]
    except Exception:  # told when it is decoded, with its reason
        return None


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
                there = len(STANDARD) - len(absent)
                _log.info("%s has %d of the 15 standard corruptions, so its mean is not the benchmark's", root, there)
            return default_order(found)
        domains = STANDARD
    missing = [name for name in domains if name not in found]
    if missing:
        raise UsageError(
            f"{root} has no domain {', '.join(missing)}; it has {', '.join(default_order(found, all_=True))}; "
            "name the ones to evaluate with --domains"
        )
    return list(domains)
