"""Trees of class folders: detect the layout, and find the images of each domain before reading them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os.path import isdir, isfile  # False for links in a loop, where DirEntry's methods raise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remtta.errors import UsageError
from remtta.files import MANIFEST
from remtta.lab.corruptions.parameters import SEVERITIES
from remtta.lab.evaluation.class_maps import composed, map_classes, restricted_set
from remtta.lab.evaluation.domains import DEFAULT_SEVERITY, Dataset, Domain, image_sizes, title_of, wanted_domains
from remtta.lab.evaluation.options import ClassOrder
from remtta.lab.evaluation.stored import LABELS
from remtta.lab.evaluation.tally import image_name
from remtta.streams.images import has_suffix, image_suffixes
from remtta.streams.listing import is_clutter, list_files, log_ignored, natural_key, none_but

ClassFolders = dict[str, Path]
Tree = dict[str, dict[int | None, ClassFolders]]
"""Class folders by domain and severity; the severity is None in a tree without severities."""

_LAYOUTS = (
    "ROOT/<corruption>/<severity>/<class>/, ROOT/<domain>/<class>/, ROOT/<class>/ and folders of CIFAR-C .npy files"
)
_LIMIT_SEED = 0  # --limit selects the same images whatever the seed of the order

_log = logging.getLogger(__name__)


class Condition(NamedTuple):
    """A domain at one severity, with its class folders."""

    name: str
    severity: int | None
    folders: ClassFolders

    @property
    def title(self) -> str:
        return title_of(self.name, self.severity)


def find_conditions(
    root: Path, domains: Sequence[str] | None, severities: Sequence[int] | None, *, complete: bool
) -> tuple[str, list[Condition]]:
    """Return the layout of a tree of class folders, and the domains to evaluate; arguments and errors are those of
    `open_dataset`.
    """
    layout, tree = scan_tree(root)
    by_severity = not any(None in levels for levels in tree.values())
    names = wanted_domains(root, tree, domains, complete=complete, by_severity=by_severity)
    return layout, _conditions(root, tree, names, severities)


def open_tree(
    root: Path,
    layout: str,
    conditions: Sequence[Condition],
    *,
    num_classes: int,
    labels: Sequence[str] | None,
    image_list: Sequence[str] | None,
    class_map: Mapping[str, int] | None,
    class_order: ClassOrder | None,
    limit: int | None,
) -> Dataset:
    """Find the images of `find_conditions`, and their classes; other arguments and errors are those of
    `open_dataset`.
    """
    folders = [folder for condition in conditions for folder in condition.folders]
    if "images" in folders and "images" not in (*(labels or ()), *(class_map or ())):
        raise UsageError(
            f"{root} has folders named images/ in place of classes, as Tiny ImageNet: move the images of each class up "
            "into its folder, or list images and classes in a --labels-file"
        )
    mapping = map_classes(folders, num_classes=num_classes, labels=labels, class_map=class_map, order=class_order)
    class_numbers, restricted = sorted(set(mapping.numbers.values())), restricted_set(folders)
    if restricted is None and any(restricted_set(list(condition.folders)) for condition in conditions):
        _log.warning("ImageNet-R or -A is restricted to its 200 classes only without other domains (--domains)")
    opened = _open_domains(root, conditions, mapping.numbers, image_list, limit)
    return Dataset(
        root=root,
        layout=layout,
        domains=opened,
        classes=mapping.matched_by,
        class_numbers=class_numbers,
        sizes=image_sizes([path for domain in opened for path in domain.sources]),
        names=mapping.names,
        other_order=mapping.other_order,
        restricted_to=restricted if len(class_numbers) < num_classes else None,
        shuffled=image_list is None,
    )


def scan_tree(root: Path) -> tuple[str, Tree]:
    """Return the layout's name, and class folders by domain and severity; raise UsageError if there are no images, or
    the layout is unknown.
    """
    first = _first_with_images(root)
    if first is None:
        others = {"*.npy": ", but arrays without labels.npy", "*.tar": ", but tar files, not CCC's: unpack them"}
        found = "".join(text for pattern, text in others.items() if any(root.glob(pattern)))
        if arrays := next(root.glob(f"**/{LABELS}"), None):
            found = f"; name the folder of arrays as ROOT: {arrays.parent}"
        list_files(root, image_suffixes(), "none", ignored := Counter[str]())
        none = none_but({} if found else ignored, "images")
        raise UsageError(f"{root}: {none} in this folder or below it{found}")
    levels = first.relative_to(root).parts
    folders = _subfolders(root)
    if len(levels) == 1:
        return "one domain of class folders", {root.resolve().name: {None: folders}}
    if len(levels) == 2 and _are_severities(folders):
        return "one corruption by severity", {root.resolve().name: _by_severity(folders)}
    if len(levels) == 2 and not (root / MANIFEST).is_file():  # in one of remtta corrupt, these are severities
        return "tree of domains", {name: {None: _subfolders(folder)} for name, folder in folders.items()}
    if len(levels) == 3 and _are_severities(_subfolders(root / levels[0])):
        return "ImageNet-C tree", {name: _by_severity(_subfolders(folder)) for name, folder in folders.items()}
    if len(levels) == 4 and _are_severities(_subfolders(root / levels[0] / levels[1])):
        corruptions: ClassFolders = {}
        for group in folders.values():
            for name, folder in _subfolders(group).items():
                if name in corruptions:
                    groups = f"{corruptions[name].parent.name}/ and in {group.name}/"
                    raise UsageError(f"{root} has {name} in {groups}; name one of these folders as ROOT")
                corruptions[name] = folder
        tree = {name: _by_severity(_subfolders(folder)) for name, folder in corruptions.items()}
        return "ImageNet-C tree in groups", tree
    if len(levels) < 3:
        raise UsageError(
            f"{first} has images without class folders, but an evaluation needs labels: list them in a --labels-file"
        )
    raise UsageError(f"{root} has images at {'/'.join(levels)}/, which is not a known layout: {_LAYOUTS}")


def _first_with_images(root: Path) -> Path | None:
    """Return the first folder with images, or None. A folder with as few images as subfolders, such as a root with an
    overview.png, is one only if there is no other.
    """
    suffixes, stray = image_suffixes(), None
    for folder, subfolders, files in os.walk(root, followlinks=True):
        subfolders[:] = sorted((name for name in subfolders if not is_clutter(name)), key=natural_key)
        num_images = sum(has_suffix(name, suffixes) and not is_clutter(name) for name in files)
        if num_images > len(subfolders):
            return Path(folder)
        stray = stray or (Path(folder) if num_images else None)
    return stray


def _subfolders(folder: Path) -> dict[str, Path]:
    names = [entry.name for entry in os.scandir(folder) if isdir(entry.path) and not is_clutter(entry.name)]
    return {composed(name): folder / name for name in sorted(names, key=natural_key)}


def _are_severities(folders: Mapping[str, Path]) -> bool:
    return bool(folders) and folders.keys() <= {str(severity) for severity in SEVERITIES}


def _by_severity(folders: Mapping[str, Path]) -> dict[int | None, ClassFolders]:
    return {int(name): _subfolders(folder) for name, folder in folders.items() if name.isdecimal()}


def _conditions(root: Path, tree: Tree, names: Sequence[str], severities: Sequence[int] | None) -> list[Condition]:
    """Return the requested domains at the requested severities.

    The severity is 5 by default, or the only one available. Raise UsageError if a severity does not exist or has no
    class folders, or several exist, none of them 5, and none was requested.
    """
    available = sorted({level for name in names for level in tree[name] if level is not None})
    if severities is None and available and DEFAULT_SEVERITY not in available:
        if len(available) > 1:
            levels = ", ".join(map(str, available))
            raise UsageError(f"{root} has no severity {DEFAULT_SEVERITY}; it has {levels}: choose with --severity")
        _log.info("%s has only severity %d, which is evaluated", root, available[0])
        severities = available
    conditions = []
    for name in names:
        for severity in (None,) if None in tree[name] else severities or (DEFAULT_SEVERITY,):
            condition = Condition(name, severity, tree[name].get(severity, {}))
            if severity not in tree[name]:
                levels = ", ".join(str(level) for level in sorted(level or 0 for level in tree[name])) or "none"
                raise UsageError(f"{name} in {root} has no severity {severity}; it has {levels}")
            if not condition.folders:
                raise UsageError(f"{condition.title} is empty: no class folders in it")
            conditions.append(condition)
    return conditions


def _open_domains(
    root: Path,
    conditions: Sequence[Condition],
    numbers: Mapping[str, int],
    image_list: Sequence[str] | None,
    limit: int | None,
) -> list[Domain]:
    """Return the domains with their images, at most `limit` each; tell what is left out, and where domains differ."""
    wanted, ignored = image_list and image_list[:limit], [Counter[str]() for _ in conditions]
    opened = [_open_domain(each, numbers, wanted, others) for each, others in zip(conditions, ignored, strict=True)]
    log_ignored(root, sum(ignored, Counter()))
    if limit is not None and image_list is None:
        opened = _limited(opened, limit)
    if len({len(domain.sources) for domain in opened}) > 1:
        counts = ", ".join(f"{domain.title} {len(domain.sources)}" for domain in opened)
        _log.warning("the domains differ in their number of images: %s", counts)
    return opened


def _open_domain(
    condition: Condition, numbers: Mapping[str, int], image_list: Sequence[str] | None, ignored: Counter[str]
) -> Domain:
    """Return a domain with the images of its class folders, or of a list ("class/name.JPEG"); raise UsageError if there
    are no images, or images of the list are missing. The folders' other files are counted in `ignored`.
    """
    name, severity, folders = condition
    if image_list is None:
        files = [(class_name, path) for class_name, folder in folders.items() for path in _images(folder, ignored)]
    else:
        parts = [(composed(image.partition("/")[0]), image.partition("/")[2]) for image in image_list]
        files = [(class_name, os.path.join(folders.get(class_name, ""), file)) for class_name, file in parts]
        exist = [class_name in folders and isfile(path) for class_name, path in files]
        if not all(exist):
            missing, first = exist.count(False), image_list[exist.index(False)]
            raise UsageError(
                f"{condition.title} lacks {missing} of the image list's {len(image_list)} images, such as {first}"
            )
    if not files:
        below = next(iter(folders.values())).parent
        raise UsageError(f"{condition.title} is empty: {none_but(ignored, 'images')} below {below}")
    labels = np.array([numbers[class_name] for class_name, _ in files], dtype=np.int64)
    return Domain(name, severity, [path for _, path in files], labels)


def _images(folder: Path, ignored: Counter[str]) -> list[str]:
    """Return the images directly in a folder, in natural order; count what else is in it, by suffix or kind."""
    paths, suffixes = [], image_suffixes()
    for entry in os.scandir(folder):
        if is_clutter(entry.name):
            ignored["hidden"] += 1
        elif not (entry.is_file(follow_symlinks=False) or isfile(entry.path)):
            ignored["folder" if isdir(entry.path) else "no file"] += 1
        elif has_suffix(entry.name, suffixes):
            paths.append(entry.path)
        else:
            ignored[Path(entry.name).suffix.lower() or "no ending"] += 1
    return sorted(paths, key=natural_key)


def _limited(domains: Sequence[Domain], limit: int) -> list[Domain]:
    """Return domains with at most `limit` images each, the same ones under all corruptions that have them."""
    names = [[image_name(source) for source in domain.sources] for domain in domains]
    shared_ranks, limited = _random_ranks(max(names, key=len)), []
    for domain, images in zip(domains, names, strict=True):
        shares_images = domain.severity is not None and not shared_ranks.keys().isdisjoint(images)
        ranks = shared_ranks if shares_images else _random_ranks(images)  # some names tell the corruption
        order = np.argsort([ranks.get(name, len(ranks)) for name in images], kind="stable")
        kept = np.sort(order[:limit])
        limited.append(replace(domain, sources=[domain.sources[i] for i in kept], labels=domain.labels[kept]))
    return limited


def _random_ranks(names: Sequence[str]) -> dict[str, int]:
    order = np.random.default_rng(_LIMIT_SEED).permutation(len(names))
    return {names[position]: rank for rank, position in enumerate(order)}
