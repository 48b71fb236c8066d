"""Map the class folders of a dataset to the class numbers of a model, never by position in a partial listing."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from timm.data import ImageNetInfo

from remtta.errors import UsageError, counted, listed
from remtta.files import read_text

_SUBSET_BY_SIZE = {1000: "imagenet-1k", 11221: "imagenet-21k-miil", 11821: "imagenet-12k", 21841: "imagenet-22k"}
_RESTRICTED_SETS = {"ImageNet-R": "imagenet_r_synsets.txt", "ImageNet-A": "imagenet_a_synsets.txt"}
_SHOWN = 4
ALPHABETICAL = "alphabetical order"


class ClassMap(NamedTuple):
    """The model's class number of each folder name, and what the names were matched by."""

    numbers: Mapping[str, int]
    matched_by: str


def map_classes(
    folders: Sequence[str],
    *,
    num_classes: int,
    labels: Sequence[str] | None = None,
    class_map: Mapping[str, int] | None = None,
) -> ClassMap:
    """Find the class number of every class folder of all domains.

    The following are tried in order: the given map; ImageNet's wnids; exactly the model's class names; numeric
    folder names; the class names apart from case and punctuation; and, if there are as many folders as classes,
    alphabetical order. Raise UsageError if a folder matches no class; the message names some.
    """
    names = sorted(set(folders))
    labels = list(labels or ())
    plain_labels = [_plain(label) for label in labels]
    counts, plain_counts = Counter(labels), Counter(plain_labels)
    by_label, by_plain_label = _numbered(labels), _numbered(plain_labels)
    if class_map is not None:
        return ClassMap(_look_up(names, class_map, num_classes, "the class map"), "the class map")
    if are_wnids(names):
        if by_label.keys() >= set(names):
            return ClassMap(_look_up(names, by_label, num_classes, "the model's labels"), "wnid, in the model's labels")
        if known := wnids(num_classes):  # none for a head of its own, such as Tiny ImageNet's
            return ClassMap(_look_up(names, known, num_classes, f"ImageNet's wnids for {num_classes} classes"), "wnid")
    if names and all(counts[name] == 1 for name in names):
        return ClassMap({name: by_label[name] for name in names}, "class name")
    if are_numbers(names):
        numbers = {name: int(name) for name in names}
        return ClassMap(_look_up(names, numbers, num_classes, "the model's classes"), "number")
    unknown = [name for name in names if _plain(name) not in by_plain_label]
    if labels and not unknown:
        if unclear := [name for name in names if plain_counts[_plain(name)] > 1]:
            raise UsageError(f"several of the model's class names fit {listed(unclear, _SHOWN)}; give --class-map FILE")
        return ClassMap({name: by_plain_label[_plain(name)] for name in names}, "class name")
    if len(unknown) < len(names):
        raise UsageError(
            f"no class of the model is named {listed(unknown, _SHOWN)} ({len(unknown)} of "
            f"{counted(len(names), 'class folder')}); correct the names (--labels), or give --class-map FILE"
        )
    if len(names) == num_classes:
        return ClassMap(_numbered(names), ALPHABETICAL)
    raise UsageError(
        f"the class folders ({listed(names, _SHOWN)}) are neither numbers nor the model's class names, and their "
        f"number ({len(names)}) is not the model's ({num_classes}); name every class's folder in --labels, or give "
        "--class-map FILE"
    )


def restricted_set(folders: Sequence[str]) -> str | None:
    """Return the name of the ImageNet variant (ImageNet-R or -A) with exactly these classes, or None."""
    names = set(folders)
    for title, file in _RESTRICTED_SETS.items():
        if names == set((resources.files("timm.data") / "_info" / file).read_text().split()):
            return title
    return None


def read_class_map(path: Path) -> dict[str, int]:
    """Read class numbers by folder name from a JSON object, or from lines of `folder number` or `folder,number`; raise
    UsageError if the file cannot be parsed.
    """
    text = read_text(path, "--class-map")
    try:
        if path.suffix == ".json":
            return {str(name): int(number) for name, number in json.loads(text).items()}
        parts = (re.split(r"[,\t ](?=[^,\t ]*$)", line.strip()) for line in text.splitlines() if line.strip())
        pairs = [(name.rstrip(",\t "), int(number)) for name, number in parts]
        if repeated := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
            raise ValueError(f"{listed(repeated, _SHOWN)} is given twice")
        return dict(pairs)
    except (OSError, ValueError, AttributeError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f'{path} is not a class map ({error}); write a line "folder number" per class, or a JSON object'
        ) from error


def are_wnids(names: Sequence[str]) -> bool:
    """Return whether all names are ImageNet's class identifiers."""
    return all(re.fullmatch(r"n\d{8}", name) for name in names)


def are_numbers(names: Sequence[str]) -> bool:
    """Return whether all names are whole numbers."""
    return all(re.fullmatch(r"\d+", name) for name in names)


def _look_up(names: Sequence[str], known: Mapping[str, int], num_classes: int, known_as: str) -> dict[str, int]:
    if missing := [name for name in names if name not in known]:
        raise UsageError(
            f"{counted(len(missing), 'class folder')} not in {known_as}: {listed(missing, _SHOWN)}; see --class-map"
        )
    if beyond := [name for name in names if not 0 <= known[name] < num_classes]:
        raise UsageError(
            f"class folder {listed(beyond, _SHOWN)} is not among the model's {num_classes} classes; see --class-map"
        )
    return {name: known[name] for name in names}


def wnids(num_classes: int) -> dict[str, int]:
    """Return the class numbers of ImageNet's wnids for models with so many classes; empty for other models."""
    subset = _SUBSET_BY_SIZE.get(num_classes)
    return {} if subset is None else _numbered(ImageNetInfo(subset).label_names())


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name).strip().casefold()
