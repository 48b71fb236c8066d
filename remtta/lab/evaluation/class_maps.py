"""Map the class folders of a dataset to the class numbers of a model, never by position in a partial listing."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from remtta.errors import UsageError, counted, listed
from remtta.files import read_text
from remtta.lab.evaluation.options import ClassOrder
from remtta.models.imagenet import read_info, wnids_of
from remtta.streams.listing import natural_key

_RESTRICTED_SETS = {"ImageNet-R": "imagenet_r_synsets.txt", "ImageNet-A": "imagenet_a_synsets.txt"}
_SHOWN = 4
_ORDERS = {"name": ("alphabetical order", "torchvision's ImageFolder"), "number": ("number order", "timm")}

_log = logging.getLogger(__name__)


class ClassMap(NamedTuple):
    """The model's class number of each folder name, and what the names were matched by."""

    numbers: Mapping[str, int]
    matched_by: str
    names: Sequence[str] | None = None  # the folders by class number, if their order gives the numbers
    other_order: Sequence[int] | None = None  # if they could be in two orders, each class's number in the other one


def map_classes(
    folders: Iterable[str],
    *,
    num_classes: int,
    labels: Sequence[str] | None = None,
    class_map: Mapping[str, int] | None = None,
    order: ClassOrder | None = None,
) -> ClassMap:
    """Find the class number of every class folder of all domains.

    The following are tried in order: the given map; ImageNet's wnids; exactly the model's class names; numeric
    folder names; the class names apart from case and punctuation; and, if there are as many folders as classes,
    alphabetical order. Raise UsageError if a folder matches no class; the message names some.

    Args:
        folders: Names in Unicode's composed form (`composed`).
        order: Take numeric folders in the order of their names, as torchvision does, or number other folders in
            natural order, as timm does.
    """
    names = sorted(set(folders))
    labels = [composed(label) for label in labels or ()]
    plain_labels = [_plain(label) for label in labels]
    by_label, by_plain_label = numbered_once(labels), numbered_once(plain_labels)
    if class_map is not None:
        class_map = {composed(name): number for name, number in class_map.items()}
        return ClassMap(_look_up(names, class_map, num_classes, "the class map"), "the class map")
    if are_wnids(names):
        if by_label.keys() >= set(names):
            return ClassMap(_look_up(names, by_label, num_classes, "the model's labels"), "wnid, in the model's labels")
        if known := wnids(num_classes):  # none for a head of its own, such as Tiny ImageNet's
            return ClassMap(_look_up(names, known, num_classes, f"ImageNet's wnids for {num_classes} classes"), "wnid")
    if names and by_label.keys() >= set(names):
        return ClassMap({name: by_label[name] for name in names}, "class name")
    if are_numbers(names) and order != "name":
        numbers = _look_up(names, {name: int(name) for name in names}, num_classes, "the model's classes")
        return ClassMap(numbers, "number", None, _other_order(numbers, num_classes, "number", order))
    unknown = [name for name in names if _plain(name) not in plain_labels]
    if labels and not unknown:
        if unclear := [name for name in names if _plain(name) not in by_plain_label]:
            raise UsageError(f"several of the model's class names fit {listed(unclear, _SHOWN)}; give --class-map FILE")
        return ClassMap({name: by_plain_label[_plain(name)] for name in names}, "class name")
    if len(unknown) < len(names):
        raise UsageError(
            f"no class of the model is named {listed(unknown, _SHOWN)} ({len(unknown)} of "
            f"{counted(len(names), 'class folder')}); correct the names (--labels), or give --class-map FILE"
        )
    if len(names) == num_classes:
        taken: ClassOrder = order or "name"
        names = _in_order(names, taken)
        numbers = _numbered(names)
        return ClassMap(numbers, _ORDERS[taken][0], names, _other_order(numbers, num_classes, taken, order))
    raise UsageError(
        f"the class folders ({listed(names, _SHOWN)}) do not name the model's classes, and their "
        f"number ({len(names)}) is not the model's ({num_classes}); name every class's folder in --labels, or give "
        "--class-map FILE"
    )


def _in_order(names: Iterable[str], order: ClassOrder) -> list[str]:
    return sorted(names, key=natural_key if order == "number" else None)


def _other_order(
    numbers: Mapping[str, int], num_classes: int, taken: ClassOrder, chosen: ClassOrder | None
) -> list[int] | None:
    """Return the number of each class if folders were in the other order, and warn of it unless one was chosen; None if
    the orders agree, or only some classes have a folder.
    """
    other: ClassOrder = "name" if taken == "number" else "number"
    ours, others = sorted(numbers, key=numbers.__getitem__), _in_order(numbers, other)
    if len(numbers) < num_classes or ours == others:
        return None
    if chosen is None:
        before, after = next(pair for pair in zip(ours, others, strict=True) if pair[0] != pair[1])
        _log.warning(
            "classes are in %s, %s before %s, as in %s; %s has %s before %s: if the model was trained with that, "
            "add --class-order %s",
            *(_ORDERS[taken][0], before, after, _ORDERS[taken][1]),
            *(_ORDERS[other][1], after, before, other),
        )
    positions = _numbered(others)
    return [positions[name] for name in ours]


def composed(name: str) -> str:
    """Return a name in Unicode's composed form (NFC); macOS writes names of folders decomposed."""
    return unicodedata.normalize("NFC", name)


def restricted_set(folders: Sequence[str]) -> str | None:
    """Return the name of the ImageNet variant (ImageNet-R or -A) with exactly these classes, or None."""
    names = set(folders)
    for title, file in _RESTRICTED_SETS.items():
        if names == set(read_info(file).split()):
            return title
    return None


def read_class_map(path: Path) -> dict[str, int]:
    """Read class numbers by folder name: lines of `folder number` or `folder,number`, timm's class map (a folder per
    line, in the order of classes), or JSON, which may be a model's `id2label`; raise UsageError if that fails.
    """
    text = read_text(path, "--class-map")
    try:
        if path.suffix == ".json":
            content = json.loads(text)
            content = _numbered(content) if isinstance(content, list) else content.get("id2label", content)
            if all(str(key).isdecimal() and not str(name).isdecimal() for key, name in content.items()):
                content = {name: number for number, name in content.items()}
            return {str(name): int(number) for name, number in content.items()}
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        parts = [re.split(r"[,\t ](?=[^,\t ]*$)", line) for line in lines]
        if not any(part[-1].isdecimal() for part in parts):
            parts = [[name, str(number)] for number, name in enumerate(lines)]
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
    return _numbered(wnids_of(num_classes))


def _numbered(names: Sequence[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


def numbered_once(names: Sequence[str]) -> dict[str, int]:
    """Return the positions of the names that occur once."""
    counts = Counter(names)
    return {name: number for name, number in _numbered(names).items() if counts[name] == 1}


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name).strip().casefold()
