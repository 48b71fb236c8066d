"""Labelled domains on disk: find out the layout, check all of it, and only then read images."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from remtta.errors import StreamError, UsageError
from remtta.evaluation.classes import ALPHABETICAL, ClassMap, map_classes, restricted_set
from remtta.streams.images import image_suffixes, load_image, natural_key

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
_log = logging.getLogger("remtta")

_SUBSET_SEED = 0  # --limit takes the same images whatever the seed of the order
_ARRAY_LABELS = "labels.npy"
_LAYOUTS = (
    "ROOT/<corruption>/<severity>/<class>/, ROOT/<domain>/<class>/, ROOT/<class>/ and folders of CIFAR-C .npy files"
)


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
        return f"{self.name}{self.severity or ''}"


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
        num_folders: How many classes there are.
        names: Names of the model's classes, where they are the folders' in alphabetical order, else None.
        restricted_to: Name of the ImageNet variant whose logits are restricted to its classes, or None.
        shuffled: Whether the order on disk is by class, so that it has to be shuffled.
        sizes: How many images there are of each width and height.
    """

    root: Path
    layout: str
    domains: Sequence[Domain]
    classes: str
    class_numbers: Sequence[int]
    num_folders: int
    names: Sequence[str] | None
    restricted_to: str | None
    shuffled: bool
    sizes: Mapping[tuple[int, int], int]

    def report(self) -> str:
        """One line: what was found."""
        images = sum(len(domain.sources) for domain in self.domains)
        size = "{}x{} pixels".format(*next(iter(self.sizes))) if len(self.sizes) == 1 else "various sizes"
        restricted = f", logits restricted to {self.restricted_to}'s" if self.restricted_to else ""
        return (
            f"{self.root}: {self.layout}, {len(self.domains)} domain(s), {images} images, {size}, "
            f"{self.num_folders} classes by {self.classes}{restricted}"
        )


def open_dataset(
    root: str | Path,
    *,
    num_classes: int,
    labels: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    severities: Sequence[int] = (5,),
    image_list: Sequence[str] | None = None,
    class_map: Mapping[str, int] | None = None,
    limit: int | None = None,
    complete: bool = False,
) -> Dataset:
    """Find the labelled domains under a folder, and check everything that can go wrong before any work.

    Args:
        root: An ImageNet-C-like tree, a tree of domains, one domain (ImageNet-R,
            -V2, -Sketch), or a folder of CIFAR-C arrays.
        num_classes: Classes of the model.
        labels: The model's class names.
        domains: Which ones, in which order; by default the standard order.
        severities: Which ones, where the layout has them.
        image_list: Only these images, in this order: lines "wnid/name.JPEG".
        class_map: Class folder to class number.
        limit: At most so many images per domain, the same for every corruption.
        complete: Where some of the fifteen standard corruptions are there, all must be, unless `domains` names some.

    Raises:
        UsageError: If there is no such folder, domain or severity, or a class cannot be mapped.
        StreamError: If a domain holds no images.
    """
    place = Path(root)
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder")
    if (place / _ARRAY_LABELS).is_file():
        if image_list is not None or class_map is not None:
            raise UsageError(f"{place} holds arrays, whose images have no names; leave --image-list, --class-map out")
        return _open_arrays(place, num_classes, domains, severities, limit, complete)
    layout, tree = _scan(place)
    chosen = _choose(place, tree, _wanted(place, tree, domains, complete), severities)
    mapping = map_classes(
        [folder for _, _, folders in chosen for folder in folders],
        num_classes=num_classes,
        labels=labels,
        class_map=class_map,
    )
    found = [
        _tree_domain(name, severity, folders, mapping, image_list, limit, place) for name, severity, folders in chosen
    ]
    _warn_of_unequal(found)
    sizes = _image_sizes([path for domain in found for path in domain.sources])
    return Dataset(
        root=place,
        layout=layout,
        domains=found,
        classes=mapping.how,
        class_numbers=sorted(set(mapping.numbers.values())),
        num_folders=len(mapping.numbers),
        names=list(mapping.numbers) if mapping.how == ALPHABETICAL else None,
        restricted_to=None if class_map else restricted_set(list(mapping.numbers)),
        shuffled=image_list is None,
        sizes=sizes,
    )


def read_image_list(path: Path) -> list[str]:
    """Class folder and file name per line, whatever else the line holds before or after them.

    Raises:
        UsageError: If the file cannot be read, or a line has no folder.
    """
    try:
        lines = [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--image-list: {path} cannot be read: {error}") from error
    names = ["/".join(line.split("/")[-2:]) for line in lines]
    bare = next((name for name in names if "/" not in name), None)
    if bare is not None or not names:
        raise UsageError(f'--image-list: {path} needs lines such as n01440764/name.JPEG, got "{bare or ""}"')
    return names


_Tree = dict[str, dict[int | None, dict[str, Path]]]


def _scan(root: Path) -> tuple[str, _Tree]:
    """The layout's name, and class folders by domain and severity."""
    first = next(_folders_with_images(root), None)
    if first is None:
        raise StreamError(f"{root}: no images in this folder or below it")
    levels = first.relative_to(root).parts
    top = _subfolders(root)
    if len(levels) == 1:
        return "one domain of class folders", {root.resolve().name: {None: top}}
    if len(levels) == 2 and _are_severities(top):
        return "one corruption by severity", {root.resolve().name: _by_severity(top)}
    if len(levels) == 2 and not _are_severities(_subfolders(root / levels[0])):
        return "tree of domains", {name: {None: _subfolders(folder)} for name, folder in top.items()}
    if len(levels) == 3 and _are_severities(_subfolders(root / levels[0])):
        return "ImageNet-C tree", {name: _by_severity(_subfolders(folder)) for name, folder in top.items()}
    if len(levels) == 4 and _are_severities(_subfolders(root / levels[0] / levels[1])):
        groups = [_subfolders(folder) for folder in top.values()]
        tree = {name: _by_severity(_subfolders(folder)) for group in groups for name, folder in group.items()}
        return "ImageNet-C tree in groups", tree
    if len(levels) < 3:
        raise UsageError(
            f"{first} holds images without class folders, and an evaluation needs labels; remtta adapt needs none"
        )
    raise UsageError(f"{root} has images at {'/'.join(levels)}/, which is no layout known here: {_LAYOUTS}")


def _choose(
    root: Path, tree: _Tree, names: Sequence[str], severities: Sequence[int]
) -> list[tuple[str, int | None, dict[str, Path]]]:
    """The domains and severities asked for, with their class folders."""
    chosen = []
    for name in names:
        levels: Sequence[int | None] = [None] if None in tree[name] else list(severities)
        for severity in levels:
            if severity not in tree[name]:
                there = ", ".join(str(level) for level in sorted(level or 0 for level in tree[name])) or "none"
                raise UsageError(f"{root / name} has no severity {severity}; it has {there}")
            if not tree[name][severity]:
                raise StreamError(f"{name}{severity or ''} is empty: no class folders in it")
            chosen.append((name, severity, tree[name][severity]))
    return chosen


def _wanted(root: Path, found: Mapping[str, Any], domains: Sequence[str] | None, complete: bool) -> list[str]:
    """The domains asked for, which must be there, or the default ones."""
    if not domains:
        absent = [name for name in STANDARD if name not in found]
        if not 0 < len(absent) < len(STANDARD):
            return default_order(found)
        if not complete:
            if any(isinstance(levels, Mapping) and None in levels for levels in found.values()):
                return default_order(found)  # without severities it is somebody's own tree that has a fog, too
            _log.warning("%d of the 15 standard corruptions are not in %s: %s", len(absent), root, ", ".join(absent))
            return default_order(found)
        domains = STANDARD
    missing = [name for name in domains if name not in found]
    if missing:
        raise UsageError(
            f"{root} has no domain {', '.join(missing)}; it has {', '.join(default_order(found, all_=True))}; "
            "name the ones to evaluate with --domains"
        )
    return list(domains)


def default_order(names: Iterator[str] | Mapping[str, Any], all_: bool = False) -> list[str]:
    """Domains in the field's order: the standard ones, ImageNet-3DCC's, then any others by name.

    The hold-outs stay out where standard ones are there, unless `all_`.
    """
    known = (*STANDARD, *THREE_D)
    present = set(names)
    others = sorted(present - set(known) - set(HOLD_OUTS), key=natural_key)
    ordered = [name for name in known if name in present] + others
    hold_outs = [name for name in HOLD_OUTS if name in present]
    return ordered + hold_outs if all_ or not ordered else ordered


def _tree_domain(
    name: str,
    severity: int | None,
    folders: Mapping[str, Path],
    mapping: ClassMap,
    image_list: Sequence[str] | None,
    limit: int | None,
    root: Path,
) -> Domain:
    title = f"{name}{severity or ''}"
    if image_list is None:
        files = [(folder, path) for folder, place in folders.items() for path in _images_in(place)]
        if limit is not None and limit < len(files):
            kept = np.sort(np.random.default_rng(_SUBSET_SEED).permutation(len(files))[:limit])
            files = [files[position] for position in kept]
    else:
        files = _listed(title, folders, image_list[:limit])
    if not files:
        raise StreamError(f"{title} is empty: no images below {next(iter(folders.values())).parent}")
    sources = [path for _, path in files]
    labels = np.array([mapping.numbers[folder] for folder, _ in files], dtype=np.int64)
    return Domain(name, severity, sources, labels, lambda position: load_image(Path(sources[position])))


def _warn_of_unequal(domains: Sequence[Domain]) -> None:
    if len({len(domain.sources) for domain in domains}) > 1:
        counts = ", ".join(f"{domain.title} {len(domain.sources)}" for domain in domains)
        _log.warning("the domains differ in their number of images: %s", counts)


def _listed(title: str, folders: Mapping[str, Path], names: Sequence[str]) -> list[tuple[str, str]]:
    files = []
    missing = []
    for name in names:
        folder, _, file = name.partition("/")
        path = os.path.join(folders[folder], file) if folder in folders else ""
        if os.path.isfile(path):
            files.append((folder, path))
        else:
            missing.append(name)
    if missing:
        raise UsageError(f"{title} lacks {len(missing)} of the image list's {len(names)} images, such as {missing[0]}")
    return files


def _open_arrays(
    root: Path,
    num_classes: int,
    domains: Sequence[str] | None,
    severities: Sequence[int],
    limit: int | None,
    complete: bool,
) -> Dataset:
    arrays = {path.stem: path for path in root.glob("*.npy") if path.name != _ARRAY_LABELS}
    if not arrays:
        raise StreamError(f"{root} has {_ARRAY_LABELS} but no <corruption>.npy")
    names = _wanted(root, arrays, domains, complete)
    labels = _load_array(root / _ARRAY_LABELS)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise StreamError(f"{root / _ARRAY_LABELS} must hold one whole number per image, got {labels.shape}")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise UsageError(
            f"{root / _ARRAY_LABELS} names class {labels.max()}, but the model has {num_classes}; see --num-classes"
        )
    found = [
        _array_domain(arrays[name], labels.astype(np.int64), severity, limit)
        for name in names
        for severity in severities
    ]
    sizes: Counter[tuple[int, int]] = Counter()
    for domain in found:
        sizes[_array_size(arrays[domain.name])] += len(domain.sources)
    return Dataset(
        root=root,
        layout="CIFAR-C arrays",
        domains=found,
        classes="number",
        class_numbers=np.unique(labels).tolist(),
        num_folders=len(np.unique(labels)),
        names=None,
        restricted_to=None,
        shuffled=False,
        sizes=sizes,
    )


def _array_domain(path: Path, labels: np.ndarray, severity: int, limit: int | None) -> Domain:
    pixels = _load_array(path)
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or len(pixels) % len(SEVERITIES):
        raise StreamError(f"{path} must hold 5 severities of uint8 images (5 N, H, W, 3), got {pixels.shape}")
    rows = len(pixels) // len(SEVERITIES)
    if len(labels) not in (rows, len(pixels)):
        raise StreamError(f"{path} has {len(pixels)} images, but {_ARRAY_LABELS} has {len(labels)} labels")
    start = (severity - 1) * rows
    count = min(rows, limit or rows)
    own = labels[:count] if len(labels) == rows else labels[start : start + count]
    sources = [f"{path}[{start + row}]" for row in range(count)]
    return Domain(path.stem, severity, sources, own, partial(_array_image, pixels, start))


def _array_image(pixels: np.ndarray, start: int, position: int) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(pixels[start + position]))


def _array_size(path: Path) -> tuple[int, int]:
    _, height, width, _ = _load_array(path).shape
    return width, height


def _load_array(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise StreamError(f"{path} cannot be read as an array: {error}") from error
    return array


def _folders_with_images(root: Path) -> Iterator[Path]:
    suffixes = image_suffixes()
    for place, below, names in os.walk(root, followlinks=True):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural_key)
        if any(os.path.splitext(name)[1].lower() in suffixes for name in names):
            below.clear()
            yield Path(place)


def _subfolders(folder: Path) -> dict[str, Path]:
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return {name: folder / name for name in sorted(names, key=natural_key)}


def _images_in(folder: Path) -> list[str]:
    suffixes = image_suffixes()
    paths = [entry.path for entry in os.scandir(folder) if entry.is_file()]
    return sorted((path for path in paths if os.path.splitext(path)[1].lower() in suffixes), key=natural_key)


def _are_severities(folders: Mapping[str, Path]) -> bool:
    return bool(folders) and all(name in {str(severity) for severity in SEVERITIES} for name in folders)


def _by_severity(folders: Mapping[str, Path]) -> dict[int | None, dict[str, Path]]:
    return {int(name): _subfolders(folder) for name, folder in folders.items() if name.isdecimal()}


def _image_sizes(paths: Sequence[str]) -> Counter[tuple[int, int]]:
    with ThreadPoolExecutor() as pool:
        return Counter(size for size in pool.map(_image_size, paths, chunksize=64) if size)


def _image_size(path: str) -> tuple[int, int] | None:
    try:
        with Image.open(path) as image:
            return image.size
    except Exception:  # told when it is decoded, with its reason
        return None
