"""Trees of class folders: detect the layout, select domains, list their images."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile  # False for links in a loop, where DirEntry's methods raise
from pathlib import Path

import numpy as np

from remtta.corruptions.manifest import MANIFEST
from remtta.corruptions.parameters import SEVERITIES
from remtta.errors import UsageError
from remtta.evaluation.domains import DEFAULT_SEVERITY, Domain, title_of
from remtta.evaluation.tally import image_name
from remtta.streams.images import has_suffix, image_suffixes, natural_key

ClassFolders = dict[str, Path]
Tree = dict[str, dict[int | None, ClassFolders]]
"""Class folders by domain and severity; the severity is None in a tree without severities."""

_LAYOUTS = (
    "ROOT/<corruption>/<severity>/<class>/, ROOT/<domain>/<class>/, ROOT/<class>/ and folders of CIFAR-C .npy files"
)
_SUBSET_SEED = 0  # --limit selects the same images whatever the seed of the order

_log = logging.getLogger("remtta")


def scan_tree(root: Path) -> tuple[str, Tree]:
    """Return the layout's name, and class folders by domain and severity; raise UsageError if there are no images, or
    the layout is unknown.
    """
    first = _first_with_images(root)
    if first is None:
        others = {"*.npy": ", but arrays without labels.npy", "*.tar": ", but tar files, not CCC's: unpack them"}
        found = "".join(what for pattern, what in others.items() if any(root.glob(pattern)))
        raise UsageError(f"{root}: no images in this folder or below it{found}")
    levels = first.relative_to(root).parts
    top = _subfolders(root)
    if len(levels) == 1:
        return "one domain of class folders", {root.resolve().name: {None: top}}
    if len(levels) == 2 and _are_severities(top):
        return "one corruption by severity", {root.resolve().name: _by_severity(top)}
    if len(levels) == 2 and not (root / MANIFEST).is_file():  # in one of remtta corrupt, these are severities
        return "tree of domains", {name: {None: _subfolders(folder)} for name, folder in top.items()}
    if len(levels) == 3 and _are_severities(_subfolders(root / levels[0])):
        return "ImageNet-C tree", {name: _by_severity(_subfolders(folder)) for name, folder in top.items()}
    if len(levels) == 4 and _are_severities(_subfolders(root / levels[0] / levels[1])):
        places = [(name, place) for folder in top.values() for name, place in _subfolders(folder).items()]
        last = dict(places)
        if twice := next((place for name, place in places if place != last[name]), None):
            where = f"{twice.parent.name}/ and in {last[twice.name].parent.name}/"
            raise UsageError(f"{root} has {twice.name} in {where}; name one of these folders as ROOT")
        return "ImageNet-C tree in groups", {name: _by_severity(_subfolders(place)) for name, place in last.items()}
    if len(levels) < 3:
        raise UsageError(
            f"{first} has images without class folders, but an evaluation needs labels: list them in a --labels-file"
        )
    raise UsageError(f"{root} has images at {'/'.join(levels)}/, which is not a known layout: {_LAYOUTS}")


def choose_folders(
    root: Path, tree: Tree, names: Sequence[str], requested: Sequence[int] | None
) -> list[tuple[str, int | None, ClassFolders]]:
    """Return the requested domains and severities with their class folders.

    The severity is 5 by default, or the only one available. Raise UsageError if a severity does not exist or has no
    class folders, or several exist, none of them 5, and none was requested.
    """
    severities, chosen = _severities(root, tree, names, requested), []
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


def _severities(root: Path, tree: Tree, names: Sequence[str], requested: Sequence[int] | None) -> Sequence[int]:
    there = sorted({level for name in names for level in tree[name] if level is not None})
    if requested is not None or not there or DEFAULT_SEVERITY in there:
        return requested or (DEFAULT_SEVERITY,)
    if len(there) > 1:
        levels = ", ".join(map(str, there))
        raise UsageError(f"{root} has no severity {DEFAULT_SEVERITY}; it has {levels}: choose with --severity")
    _log.info("%s has only severity %d, which is evaluated", root, there[0])
    return there


def tree_domain(
    name: str,
    severity: int | None,
    folders: ClassFolders,
    numbers: Mapping[str, int],
    image_list: Sequence[str] | None,
) -> Domain:
    """Return a domain with the images of its class folders, or of a list ("class/name.JPEG"); raise UsageError if there
    are no images, or images of the list are missing.
    """
    title = title_of(name, severity)
    if image_list is None:
        files = [(folder, path) for folder, place in folders.items() for path in _images(place)]
    else:
        files = _listed(title, folders, image_list)
    if not files:
        raise UsageError(f"{title} is empty: no images below {next(iter(folders.values())).parent}")
    labels = np.array([numbers[folder] for folder, _ in files], dtype=np.int64)
    return Domain(name, severity, [path for _, path in files], labels)


def limited(domains: Sequence[Domain], limit: int) -> list[Domain]:
    """Return domains with at most `limit` images each, the same ones under all corruptions that have them."""
    names = [[image_name(source) for source in domain.sources] for domain in domains]
    largest, found = _shuffled(max(names, key=len)), []
    for domain, own in zip(domains, names, strict=True):
        apart = domain.severity is None or largest.keys().isdisjoint(own)  # some names tell the corruption
        places = _shuffled(own) if apart else largest
        order = np.argsort([places.get(name, len(places)) for name in own], kind="stable")
        kept = np.sort(order[:limit])
        found.append(replace(domain, sources=[domain.sources[each] for each in kept], labels=domain.labels[kept]))
    return found


def _shuffled(names: Sequence[str]) -> dict[str, int]:
    """Return the place of each name in a random order."""
    drawn = np.random.default_rng(_SUBSET_SEED).permutation(len(names))
    return {names[each]: place for place, each in enumerate(drawn)}


def _listed(title: str, folders: Mapping[str, Path], names: Sequence[str]) -> list[tuple[str, str]]:
    parts = [name.partition("/") for name in names]
    files = [(folder, os.path.join(folders.get(folder, ""), file)) for folder, _, file in parts]
    there = [folder in folders and isfile(path) for folder, path in files]
    if not all(there):
        missing, first = there.count(False), names[there.index(False)]
        raise UsageError(f"{title} lacks {missing} of the image list's {len(names)} images, such as {first}")
    return files


def _images(folder: Path) -> list[str]:
    """Return the images directly in a folder, in natural order."""
    suffixes = image_suffixes()
    files = (entry for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False) or isfile(entry.path))
    paths = [entry.path for entry in files if not entry.name.startswith(".")]
    return sorted((path for path in paths if has_suffix(path, suffixes)), key=natural_key)


def _first_with_images(root: Path) -> Path | None:
    suffixes = image_suffixes()
    for place, below, names in os.walk(root, followlinks=True):
        below[:] = sorted((name for name in below if not name.startswith(".")), key=natural_key)
        if any(has_suffix(name, suffixes) for name in names):
            return Path(place)
    return None


def _subfolders(folder: Path) -> dict[str, Path]:
    names = [entry.name for entry in os.scandir(folder) if isdir(entry.path) and not entry.name.startswith(".")]
    return {name: folder / name for name in sorted(names, key=natural_key)}


def _are_severities(folders: Mapping[str, Path]) -> bool:
    return bool(folders) and all(name in {str(severity) for severity in SEVERITIES} for name in folders)


def _by_severity(folders: Mapping[str, Path]) -> dict[int | None, ClassFolders]:
    return {int(name): _subfolders(folder) for name, folder in folders.items() if name.isdecimal()}
