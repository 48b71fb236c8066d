"""Labelled domains on disk: find out the layout, check all of it, and only then read images."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from remtta.errors import UsageError
from remtta.evaluation.arrays import LABELS, array_domain, find_arrays, image_size, load_labels
from remtta.evaluation.classes import ALPHABETICAL, ClassMap, map_classes, restricted_set, spoken_names
from remtta.evaluation.domains import DEFAULT_SEVERITY, Domain, load_at, title_of, wanted_domains
from remtta.evaluation.listed import listed_domain
from remtta.evaluation.shards import find_shards, shard_domain
from remtta.evaluation.trees import choose_folders, choose_severities, image_sizes, list_images, scan_tree

_log = logging.getLogger("remtta")

_SUBSET_SEED = 0  # --limit takes the same images whatever the seed of the order


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
    severities: Sequence[int] | None = None,
    image_list: Sequence[str] | None = None,
    class_map: Mapping[str, int] | None = None,
    limit: int | None = None,
    complete: bool = False,
    labels_file: Path | None = None,
) -> Dataset:
    """Find the labelled domains under a folder, and check everything that can go wrong before any work.

    Args:
        root: An ImageNet-C-like tree, a tree of domains, one domain (ImageNet-R,
            -V2, -Sketch), a folder of CIFAR-C arrays, or one of CCC's tar files.
        num_classes: Classes of the model.
        labels: The model's class names.
        domains: Which ones, in which order; by default the standard order.
        severities: Which ones, where the layout has them; by default 5, or the only one that there is.
        image_list: Only these images, in this order: lines "wnid/name.JPEG".
        class_map: Class folder to class number.
        limit: At most so many images per domain, the same for every corruption.
        complete: Where some of the fifteen standard corruptions are there, all must be, unless `domains` names some.
        labels_file: A list of images and their classes, relative to the root, to evaluate on in its order.

    Raises:
        UsageError: If there is no such folder, domain or severity, a domain holds no images, arrays do not fit, or a
            class cannot be mapped.
        StreamError: If an array cannot be read.
    """
    place = Path(root)
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder")
    selected = any(each is not None for each in (domains, severities, image_list, class_map))
    if labels_file is not None:
        if selected:
            raise UsageError(
                "--labels-file names the images; leave --domains, --severity, --image-list, --class-map out"
            )
        return _open_listed(place, labels_file, num_classes, labels, limit)
    if shards := find_shards(place):
        if selected:
            raise UsageError(
                f"{place} is one stored stream; leave --domains, --severity, --image-list, --class-map out"
            )
        return _open_shards(place, shards, num_classes, limit)
    if not (place / LABELS).is_file():
        return _open_tree(place, num_classes, labels, domains, severities, image_list, class_map, limit, complete)
    if image_list is not None or class_map is not None:
        raise UsageError(f"{place} holds arrays, whose images have no names; leave --image-list, --class-map out")
    return _open_arrays(place, num_classes, domains, severities, limit, complete)


def class_names(root: Path) -> list[str] | None:
    """What a data set's folders call its classes, for a zero-shot model; None where they are ImageNet's wnids.

    Raises:
        UsageError: If they have no names, as in arrays and tar files.
    """
    tree = {} if (root / LABELS).is_file() or find_shards(root) else scan_tree(root)[1]
    return spoken_names([folder for levels in tree.values() for folders in levels.values() for folder in folders], root)


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


def _open_tree(
    root: Path,
    num_classes: int,
    labels: Sequence[str] | None,
    domains: Sequence[str] | None,
    severities: Sequence[int] | None,
    image_list: Sequence[str] | None,
    class_map: Mapping[str, int] | None,
    limit: int | None,
    complete: bool,
) -> Dataset:
    layout, tree = scan_tree(root)
    by_severity = not any(None in levels for levels in tree.values())
    names = wanted_domains(root, tree, domains, complete=complete, by_severity=by_severity)
    chosen = choose_folders(root, tree, names, choose_severities(root, tree, names, severities))
    mapping = map_classes(
        [folder for _, _, folders in chosen for folder in folders],
        num_classes=num_classes,
        labels=labels,
        class_map=class_map,
    )
    found = [_tree_domain(name, severity, folders, mapping, image_list, limit) for name, severity, folders in chosen]
    _warn_of_unequal(found)
    return Dataset(
        root=root,
        layout=layout,
        domains=found,
        classes=mapping.how,
        class_numbers=sorted(set(mapping.numbers.values())),
        num_folders=len(mapping.numbers),
        names=list(mapping.numbers) if mapping.how == ALPHABETICAL else None,
        restricted_to=None if class_map else restricted_set(list(mapping.numbers)),
        shuffled=image_list is None,
        sizes=image_sizes([path for domain in found for path in domain.sources]),
    )


def _tree_domain(
    name: str,
    severity: int | None,
    folders: Mapping[str, Path],
    mapping: ClassMap,
    image_list: Sequence[str] | None,
    limit: int | None,
) -> Domain:
    title = title_of(name, severity)
    if image_list is None:
        files = [(folder, path) for folder, place in folders.items() for path in list_images(place)]
        if limit is not None and limit < len(files):
            kept = np.sort(np.random.default_rng(_SUBSET_SEED).permutation(len(files))[:limit])
            files = [files[position] for position in kept]
    else:
        files = _listed(title, folders, image_list[:limit])
    if not files:
        raise UsageError(f"{title} is empty: no images below {next(iter(folders.values())).parent}")
    sources = [path for _, path in files]
    labels = np.array([mapping.numbers[folder] for folder, _ in files], dtype=np.int64)
    return Domain(name, severity, sources, labels, partial(load_at, sources))


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


def _warn_of_unequal(domains: Sequence[Domain]) -> None:
    if len({len(domain.sources) for domain in domains}) > 1:
        counts = ", ".join(f"{domain.title} {len(domain.sources)}" for domain in domains)
        _log.warning("the domains differ in their number of images: %s", counts)


def _open_listed(root: Path, file: Path, num_classes: int, names: Sequence[str] | None, limit: int | None) -> Dataset:
    domain = listed_domain(file, root, num_classes, names, limit)
    return _numbered(root, f"images listed in {file}", [domain], domain.labels, image_sizes(domain.sources))


def _open_shards(root: Path, shards: list[Path], num_classes: int, limit: int | None) -> Dataset:
    domain, sizes = shard_domain(root, shards, num_classes, limit)
    return _numbered(root, "CCC shards", [domain], domain.labels, sizes)


def _open_arrays(
    root: Path,
    num_classes: int,
    domains: Sequence[str] | None,
    severities: Sequence[int] | None,
    limit: int | None,
    complete: bool,
) -> Dataset:
    arrays = find_arrays(root)
    names = wanted_domains(root, arrays, domains, complete=complete, by_severity=True)
    labels = load_labels(root, num_classes)
    levels = severities or (DEFAULT_SEVERITY,)
    found = [array_domain(arrays[name], labels, severity, limit) for name in names for severity in levels]
    sizes: Counter[tuple[int, int]] = Counter()
    for domain in found:
        sizes[image_size(arrays[domain.name])] += len(domain.sources)
    return _numbered(root, "CIFAR-C arrays", found, labels, sizes)


def _numbered(
    root: Path, layout: str, domains: Sequence[Domain], labels: np.ndarray, sizes: Mapping[tuple[int, int], int]
) -> Dataset:
    """A data set whose classes have numbers, and whose order is its own."""
    numbers = np.unique(labels).tolist()
    return Dataset(
        root=root,
        layout=layout,
        domains=domains,
        classes="number",
        class_numbers=numbers,
        num_folders=len(numbers),
        names=None,
        restricted_to=None,
        shuffled=False,
        sizes=sizes,
    )
