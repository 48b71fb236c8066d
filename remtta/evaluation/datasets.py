"""Open labelled domains: detect the layout and validate it before reading images."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from remtta.errors import UsageError
from remtta.evaluation.class_maps import ALPHABETICAL, map_classes, restricted_set, zero_shot_names
from remtta.evaluation.domains import DEFAULT_SEVERITY, Dataset, image_sizes, wanted_domains
from remtta.evaluation.stored import LABELS, find_arrays, find_shards, open_arrays, open_list, open_shards
from remtta.evaluation.trees import choose_folders, limited, scan_tree, tree_domain
from remtta.files import read_text
from remtta.streams.images import natural_key

_AFTER_NAME = re.compile(r"(\s+[^\s./]+)+$")  # such as the class number

_log = logging.getLogger("remtta")


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
    """Find the labelled domains in a folder, and validate everything before any work starts.

    Args:
        root: An ImageNet-C-like tree, a tree of domains, one domain (ImageNet-R, -V2, -Sketch), a folder of CIFAR-C
            arrays, or one of CCC's tar files.
        labels: Names of the model's classes, by which folders are matched.
        domains: Names in the order of evaluation; by default all, in the standard order.
        severities: By default 5, or the only one available. Ignored for layouts without severities.
        image_list: Only these images, in this order: lines "wnid/name.JPEG".
        limit: At most this many images per domain, the same for every corruption.
        complete: If any of the fifteen standard corruptions is present, require all of them, unless `domains` is given.
        labels_file: A list of images and their classes, relative to the root, evaluated in its order.

    Raises:
        UsageError: If the folder, a domain or a severity does not exist, a domain holds no images, arrays have wrong
            shapes, or a class cannot be mapped.
        StreamError: If an array cannot be read.
    """
    place = Path(root)
    if not place.is_dir():
        raise UsageError(f"{place}: no such folder")
    for what, given in (("domain", domains or ()), ("severity", severities or ())):
        if twice := [each for each, count in Counter(given).items() if count > 1]:
            hint = "; --scenario recurring --visits 2 repeats all domains" if what == "domain" else ""
            raise UsageError(f"{what} {twice[0]} is given twice{hint}")
    shards = find_shards(place)
    if (labels_file is not None or shards) and any(
        each is not None for each in (domains, severities, image_list, class_map)
    ):
        what = f"{place} is one stored stream" if labels_file is None else "--labels-file names the images"
        raise UsageError(f"{what}; leave --domains, --severity, --image-list, --class-map out")
    if labels_file is not None:
        return open_list(labels_file, place, num_classes, labels, limit)
    if shards:
        return open_shards(place, shards, num_classes, limit)
    if (place / LABELS).is_file():
        if image_list is not None or class_map is not None:
            raise UsageError(f"{place} holds arrays, whose images have no names; leave --image-list, --class-map out")
        arrays = find_arrays(place)
        names = wanted_domains(place, arrays, domains, complete=complete, by_severity=True)
        levels = severities or (DEFAULT_SEVERITY,)
        return open_arrays(place, [arrays[name] for name in names], levels, num_classes, limit)

    layout, tree = scan_tree(place)
    by_severity = not any(None in levels for levels in tree.values())
    names = wanted_domains(place, tree, domains, complete=complete, by_severity=by_severity)
    chosen = choose_folders(place, tree, names, severities)
    folders = [folder for _, _, own in chosen for folder in own]
    mapping = map_classes(folders, num_classes=num_classes, labels=labels, class_map=class_map)
    if mapping.how == ALPHABETICAL:
        _warn_of_order(list(mapping.numbers))
    class_numbers, restricted = sorted(set(mapping.numbers.values())), restricted_set(list(mapping.numbers))
    if restricted is None and any(restricted_set(list(own)) for _, _, own in chosen):
        _log.warning("ImageNet-R or -A is restricted to its 200 classes only without other domains (--domains)")
    found = [tree_domain(*each, mapping.numbers, image_list and image_list[:limit]) for each in chosen]
    if limit is not None and image_list is None:
        found = limited(found, limit)
    if len({len(domain.sources) for domain in found}) > 1:
        counts = ", ".join(f"{domain.title} {len(domain.sources)}" for domain in found)
        _log.warning("the domains differ in their number of images: %s", counts)
    return Dataset(
        root=place,
        layout=layout,
        domains=found,
        classes=mapping.how,
        class_numbers=class_numbers,
        sizes=image_sizes([path for domain in found for path in domain.sources]),
        names=list(mapping.numbers) if mapping.how == ALPHABETICAL else None,
        restricted_to=restricted if len(class_numbers) < num_classes else None,
        shuffled=image_list is None,
    )


def _warn_of_order(names: Sequence[str]) -> None:
    """Warn if timm numbers these class folders in another order than torchvision."""
    orders = zip(names, sorted(names, key=natural_key), strict=True)
    if pair := next((pair for pair in orders if pair[0] != pair[1]), None):
        _log.warning(
            "classes are numbered as by torchvision's ImageFolder, with %s before %s; timm's has %s before %s: "
            "if the model was trained with that, list its classes in --labels",
            *(*pair, *reversed(pair)),
        )


def class_names(root: Path) -> list[str] | None:
    """Return the class names for a zero-shot model from the dataset's folders, or None for ImageNet's wnids; raise
    UsageError if the classes have no names, as in arrays and tar files.
    """
    tree = {} if (root / LABELS).is_file() or find_shards(root) else scan_tree(root)[1]
    return zero_shot_names(
        [folder for levels in tree.values() for folders in levels.values() for folder in folders], root
    )


def read_image_list(path: Path) -> list[str]:
    """Return "class folder/file name" for each line of an image list, without later words that have no dot; raise
    UsageError if the file cannot be read, or a line names no folder.
    """
    lines = [line.strip() for line in read_text(path, "--image-list").splitlines() if line.strip()]
    names = ["/".join(_AFTER_NAME.sub("", line).split("/")[-2:]) for line in lines]
    bare = next((name for name in names if "/" not in name), None)
    if bare is not None or not names:
        raise UsageError(f'--image-list: {path} needs lines such as n01440764/name.JPEG, got "{bare or ""}"')
    return names
