"""Labelled images by domain, and the standard order of domains."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.errors import FrameError, UsageError, counted
from remtta.lab.corruptions.parameters import HOLD_OUTS, STANDARD
from remtta.streams.images import load_image
from remtta.streams.listing import natural_key
from remtta.streams.pillow import open_image

THREE_D = (
    *("near_focus", "far_focus", "color_quant", "iso_noise", "low_light", "flash"),
    *("fog_3d", "bit_error", "h265_abr", "h265_crf", "xy_motion_blur", "z_motion_blur"),
)
"""ImageNet-3DCC's corruptions."""

DEFAULT_SEVERITY = 5

Sizes = Mapping[tuple[int, int], int]
"""Number of images of each (width, height)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Domain:
    """Labelled images of one condition."""

    name: str  # e.g. "gaussian_noise"
    severity: int | None  # 1 to 5, or None if the layout has no severities
    sources: Sequence[str]  # path of each image, or array and row
    labels: np.ndarray  # shape (n,): the model's class number of each image
    read: Callable[[int], Image.Image] | None = None  # decodes the image at a position; None for image files

    @property
    def title(self) -> str:
        """Name and severity in one, as usual in the literature: "gaussian_noise5"."""
        return title_of(self.name, self.severity)

    @cached_property
    def first_image_sha256(self) -> str | None:
        """Hash of the first image's pixels, which shows whether images were replaced; None if it cannot be read."""
        with contextlib.suppress(FrameError):
            return hashlib.sha256(self.load(0).tobytes()).hexdigest()
        return None

    def load(self, position: int) -> Image.Image:
        """Decode the image at a position to RGB; raise FrameError if that fails."""
        return self.read(position) if self.read else load_image(Path(self.sources[position]))


@dataclass(frozen=True)
class Dataset:
    """Domains to evaluate on."""

    root: Path
    layout: str  # description of the layout, for messages
    domains: Sequence[Domain]  # in the order of evaluation
    classes: str  # how class folders were mapped to numbers
    class_numbers: Sequence[int]  # the model's, of all folders or labels, ascending, whatever limit or image list
    sizes: Sizes
    names: Sequence[str] | None = None  # class names, if the order of the folders gives the numbers
    other_order: Sequence[int] | None = None  # each class's number in another order of the folders, if it is unclear
    restricted_to: str | None = None  # name of the ImageNet variant to whose classes the logits are restricted
    shuffled: bool = False  # whether the images need shuffling because they are stored by class

    def report(self) -> str:
        """Describe the dataset in one line."""
        images = sum(len(domain.sources) for domain in self.domains)
        size = "{}x{} pixels".format(*next(iter(self.sizes))) if len(self.sizes) == 1 else "various sizes"
        restricted = f", logits restricted to {self.restricted_to}'s" if self.restricted_to else ""
        classes = f"{len(self.class_numbers)} class{'' if len(self.class_numbers) == 1 else 'es'}"
        return (
            f"{self.root}: {self.layout}, {counted(len(self.domains), 'domain')}, {counted(images, 'image')}, {size}, "
            f"{classes} by {self.classes}{restricted}"
        )


def title_of(name: str, severity: int | None) -> str:
    """Return a domain's name and severity in one string."""
    return f"{name}{severity or ''}"


def image_sizes(paths: Sequence[str]) -> Counter[tuple[int, int]]:
    """Count images by width and height, read from their headers; unreadable images are skipped."""
    with ThreadPoolExecutor() as pool:
        return Counter(size for size in pool.map(_image_size, paths, chunksize=64) if size)


def _image_size(path: str) -> tuple[int, int] | None:
    try:
        with open_image(Path(path)) as image:
            return image.size[:2]
    except Exception:  # reported with its reason when it is decoded
        return None


def default_order(names: Iterable[str], with_hold_outs: bool = False) -> list[str]:
    """Sort domains into the standard order: ImageNet-C's, then ImageNet-3DCC's, then any others by name.

    The hold-outs are left out if any other domain is present, unless `with_hold_outs` is true.
    """
    known = (*STANDARD, *THREE_D)
    present = set(names)
    others = sorted(present - set(known) - set(HOLD_OUTS), key=natural_key)
    ordered = [name for name in known if name in present] + others
    hold_outs = [name for name in HOLD_OUTS if name in present]
    return ordered + hold_outs if with_hold_outs or not ordered else ordered


def wanted_domains(
    root: Path, found: Collection[str], domains: Sequence[str] | None, *, complete: bool, by_severity: bool
) -> list[str]:
    """Return the domains to evaluate: those requested, or else the default ones; raise UsageError if one is missing, or
    a name is not UTF-8, as tables and plots need.

    `complete` is that of `open_dataset`; `by_severity`, whether the layout has severities: only then is an incomplete
    set of standard corruptions pointed out.
    """
    if invalid := [name for name in found if name.encode(errors="replace").decode() != name]:
        raise UsageError(f"{root} has a domain whose name is not UTF-8, {invalid[0]!r}; rename it")
    if not domains:
        num_standard = sum(name in found for name in STANDARD)
        is_partial = 0 < num_standard < len(STANDARD)
        if is_partial and by_severity and not complete:
            _log.info(
                "%s has %d of the 15 standard corruptions, so its mean is not the benchmark's", root, num_standard
            )
        if not (is_partial and complete):
            return default_order(found)
        domains = STANDARD
    if missing := [name for name in domains if name not in found]:
        known = ", ".join(default_order(found, with_hold_outs=True))
        raise UsageError(
            f"{root} has no domain {', '.join(missing)}; it has {known}; name the ones to evaluate with --domains"
        )
    return list(domains)
