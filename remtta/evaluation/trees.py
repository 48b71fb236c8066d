"""Trees of class folders: find out the layout, take the domains asked for, list their images."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from remtta.errors import UsageError
from remtta.evaluation.domains import DEFAULT_SEVERITY, SEVERITIES, title_of
from remtta.streams.images import has_suffix, image_suffixes, natural_key
from remtta.streams.pillow import opened

ClassFolders = dict[str, Path]
Tree = dict[str, dict[int | None, ClassFolders]]
"""Class folders by domain and severity, which is None in a tree without severities."""

_LAYOUTS = (
    "ROOT/<corruption>/<severity>/<class>/, ROOT/<domain>/<class>/, ROOT/<class>/ and folders of CIFAR-C .npy files"
)

_log = logging.getLogger("remtta")


def scan_tree(root: Path) -> tuple[str, Tree]:
    """The layout's name, and class folders by domain and severity.

    Raises:
        UsageError: If there are no images, or the layout is none known here.
    """
    first = _first_with_images(root)
    if first is None:
        raise UsageError(f"{root}: no images in this folder or below it")
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


def choose_severities(root: Path, tree: Tree, names: Sequence[str], asked: Sequence[int] | None) -> Sequence[int]:
    """The severities asked for; without, the usual one, or the only one that these domains have.

    Raises:
        UsageError: If none was asked for, and they have several but not the usual one.
    """
    there = sorted({level for name in names for level in tree[name] if level is not None})
    if asked is not None or not there or DEFAULT_SEVERITY in there:
        return asked or (DEFAULT_SEVERITY,)
    if len(there) > 1:
        levels = ", ".join(map(str, there))
        raise UsageError(f"{root} has no severity {DEFAULT_SEVERITY}; it has {levels}: choose by --severity")
    _log.info("%s has only severity %d, which is evaluated", root, there[0])
    return there


def choose_folders(
    root: Path, tree: Tree, names: Sequence[str], severities: Sequence[int]
) -> list[tuple[str, int | None, ClassFolders]]:
    """The domains and severities asked for, with their class folders.

    Raises:
        UsageError: If there is no such severity, or there are no class folders in it.
    """
    chosen = []
    for name in names:
        levels: Sequence[int | None] = [None] if None in tree[name] else list(severities)
        for severity in levels:
            if severity not in tree[name]:
                there = ", ".join(str(level) for level in sorted(level or 0 for level in tree[name])) or "none"
                raise UsageError(f"{name} in {root} has no severity {severity}; it has {there}")
            if not tree[name][severity]:
                raise UsageError(f"{title_of(name, severity)} is empty: no class folders in it")
            chosen.append((name, severity, tree[name][severity]))
    return chosen


def list_images(folder: Path) -> list[str]:
    """The images right in a folder, in natural order."""
    suffixes = image_suffixes()
    paths = [entry.path for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith(".")]
    return sorted((path for path in paths if has_suffix(path, suffixes)), key=natural_key)


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


def _first_with_images(root: Path) -> Path | None:
    suffixes = image_suffixes()
    for place, below, names in os.walk(root, followlinks=True):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural_key)
        if any(has_suffix(name, suffixes) for name in names):
            return Path(place)
    return None


def _subfolders(folder: Path) -> dict[str, Path]:
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    return {name: folder / name for name in sorted(names, key=natural_key)}


def _are_severities(folders: Mapping[str, Path]) -> bool:
    return bool(folders) and all(name in {str(severity) for severity in SEVERITIES} for name in folders)


def _by_severity(folders: Mapping[str, Path]) -> dict[int | None, ClassFolders]:
    return {int(name): _subfolders(folder) for name, folder in folders.items() if name.isdecimal()}
