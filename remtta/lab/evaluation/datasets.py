"""Open labelled domains: detect the layout, and validate everything before any work starts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from remtta.errors import UsageError
from remtta.files import read_text
from remtta.lab.evaluation.class_maps import are_numbers, are_wnids
from remtta.lab.evaluation.domains import Dataset
from remtta.lab.evaluation.options import ClassOrder
from remtta.lab.evaluation.stored import LABELS, find_shards, open_arrays, open_list, open_shards
from remtta.lab.evaluation.trees import find_conditions, open_tree, scan_tree

_AFTER_NAME = re.compile(r"(\s+[^\s./]+)+$")  # such as the class number


def open_dataset(
    root: str | Path,
    *,
    num_classes: int,
    labels: Sequence[str] | None = None,
    domains: Sequence[str] | None = None,
    severities: Sequence[int] | None = None,
    image_list: Sequence[str] | None = None,
    class_map: Mapping[str, int] | None = None,
    class_order: ClassOrder | None = None,
    limit: int | None = None,
    complete: bool = False,
    labels_file: Path | None = None,
) -> Dataset:
    """Find the labelled domains in a folder, and validate everything before any work starts.

    Args:
        root: An ImageNet-C-like tree, a tree of domains, one domain (ImageNet-R, -V2, -Sketch), a folder of CIFAR-C
            arrays, or one of CCC's tar files.
        labels: Names of the model's classes, by which folders are matched.
        domains: Names in the order of evaluation; by default all, in the standard order.
        severities: By default 5, or the only one available. Ignored for layouts without severities.
        image_list: Only these images, in this order: lines "wnid/name.JPEG".
        class_order: The order that gives class folders their numbers; see `map_classes`.
        limit: At most this many images per domain, the same for every corruption.
        complete: If any of the fifteen standard corruptions is present, require all of them, unless `domains` is given.
        labels_file: A list of images and their classes, relative to the root, evaluated in its order.

    Raises:
        UsageError: If the folder, a domain or a severity does not exist, a domain holds no images, arrays have wrong
            shapes, or a class cannot be mapped.
        StreamError: If an array cannot be read.
    """
    found = find_dataset(
        Path(root),
        domains=domains,
        severities=severities,
        image_list=image_list,
        class_map=class_map,
        class_order=class_order,
        limit=limit,
        complete=complete,
        labels_file=labels_file,
    )
    return found.open(num_classes, labels)


class FoundDataset(NamedTuple):
    """Labelled domains whose classes are not known yet."""

    open: Callable[[int, Sequence[str] | None], Dataset]  # with the number and the names of the model's classes
    has_severities: bool


def find_dataset(
    root: Path,
    *,
    domains: Sequence[str] | None,
    severities: Sequence[int] | None,
    image_list: Sequence[str] | None,
    class_map: Mapping[str, int] | None,
    class_order: ClassOrder | None,
    limit: int | None,
    complete: bool,
    labels_file: Path | None,
) -> FoundDataset:
    """Do the part of `open_dataset` that needs no model: find domains and severities; errors are the same."""
    if not root.is_dir():
        raise UsageError(f"{root}: no such folder")
    for name, values in (("domain", domains or ()), ("severity", severities or ())):
        if repeated := [value for value, count in Counter(values).items() if count > 1]:
            hint = "; --scenario recurring --visits 2 repeats all domains" if name == "domain" else ""
            raise UsageError(f"{name} {repeated[0]} is given twice{hint}")
    by_folder = {"image_list": image_list, "class_map": class_map, "class_order": class_order}
    of_tree = {"domains": domains, "severity": severities, **by_folder}
    if labels_file is not None:
        _refuse(of_tree, "--labels-file names the images")
        return FoundDataset(lambda num, names: open_list(labels_file, root, num, names, limit), False)
    if shards := find_shards(root):
        _refuse(of_tree, f"{root} is one stored stream")
        return FoundDataset(lambda num, names: open_shards(root, shards, num, limit), False)
    if (root / LABELS).is_file():
        _refuse(by_folder, f"{root} holds arrays, whose images have no names")
        return FoundDataset(
            lambda num, names: open_arrays(root, domains, severities, num, limit, complete=complete), True
        )
    layout, conditions = find_conditions(root, domains, severities, complete=complete)
    return FoundDataset(
        lambda num, names: open_tree(
            root,
            layout,
            conditions,
            num_classes=num,
            labels=names,
            image_list=image_list,
            class_map=class_map,
            class_order=class_order,
            limit=limit,
        ),
        any(condition.severity is not None for condition in conditions),
    )


def _refuse(options: Mapping[str, object], reason: str) -> None:
    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise UsageError(f"{reason}; leave {', '.join(given)} out")


def class_names(root: Path) -> list[str] | None:
    """Return a dataset's class folders as names for a zero-shot model: in alphabetical order, with spaces for `_`; None
    for ImageNet's wnids, whose names are known. Raise UsageError if the classes have no names, as in arrays and tar
    files.
    """
    tree = {} if (root / LABELS).is_file() or find_shards(root) else scan_tree(root)[1]
    names = sorted({name for levels in tree.values() for folders in levels.values() for name in folders})
    if names and are_wnids(names):
        return None
    if are_numbers(names):
        raise UsageError(f"{root} does not name its classes; name them with --labels FILE")
    return [name.replace("_", " ") for name in names]


def read_image_list(path: Path) -> list[str]:
    """Return "class folder/file name" for each line of an image list, without later words that have no dot; raise
    UsageError if the file cannot be read, or a line names no folder.
    """
    lines = [line.strip() for line in read_text(path, "--image-list").splitlines() if line.strip()]
    names = ["/".join(_AFTER_NAME.sub("", line).split("/")[-2:]) for line in lines]
    invalid = next((name for name in names if "/" not in name), None)
    if invalid is not None or not names:
        raise UsageError(f'--image-list: {path} needs lines such as n01440764/name.JPEG, got "{invalid or ""}"')
    return names
