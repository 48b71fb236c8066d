"""Which images a folder holds, and what their corrupted files are called."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from remtta.corruptions.record import RECORD
from remtta.errors import UsageError
from remtta.remote import Folder, Stored
from remtta.streams.images import has_suffix, image_suffixes, list_files, natural_key

SUFFIXES = {"jpeg": ".JPEG", "png": ".png"}
"""Endings of the files that are written; a source that already ends in one of its format keeps its name."""

_SAME_FORMAT = {"jpeg": frozenset({".jpg", ".jpeg"}), "png": frozenset({".png"})}


@dataclass(frozen=True)
class SourceImage:
    """One image to corrupt.

    Attributes:
        path: The file.
        name: Its path below the source folder, with forward slashes: part of its seed.
        targets: Format to the path of what is made from it, below the folder of a corruption and severity.
    """

    path: Path | Stored
    name: str
    targets: dict[str, str]


def find_images(source: Folder, destination: Folder, limit: int | None = None) -> list[SourceImage]:
    """The images of a folder and below it, in natural order, or the one that `source` is.

    Args:
        source: Image or folder; what lies in `destination`, or in a tree that
            was made by remtta corrupt before, is left out.
        destination: Where the corrupted images will be.
        limit: Take the first so many of every class (the folders in `source`).

    Raises:
        UsageError: If there is no such source, it holds no images, or it is the destination.
    """
    root, names = _stored(source, destination) if isinstance(source, Stored) else _in_folder(source, destination)
    if not names:
        raise UsageError(f"{source}: no images in this folder or below it")
    targets = {kind: target_names(names, kind) for kind in SUFFIXES}
    return [
        SourceImage(root / name.as_posix(), name.as_posix(), {kind: targets[kind][name] for kind in SUFFIXES})
        for name in _limited(names, limit)
    ]


def _in_folder(source: Path, destination: Folder) -> tuple[Path, list[PurePath]]:
    """A folder, and the images in it and below it."""
    if not os.path.exists(source):
        raise UsageError(f"{source}: no such file or folder")
    if source.is_file():
        return source.parent, [PurePath(source.name)]
    files = list_files(source, image_suffixes(), "name")
    trees = [record.parent for record in source.rglob(RECORD) if record.parent != source]
    if isinstance(destination, Path):
        if os.path.realpath(source) == os.path.realpath(destination):
            raise _itself(destination)
        trees.append(destination)
    for tree in trees:
        files = _outside(tree, files)
    return source, [file.relative_to(source) for file in files]


def _stored(source: Stored, destination: Folder) -> tuple[Stored, list[PurePath]]:
    """A folder of a store, and the images in it and below it."""
    if str(source) == str(destination):
        raise _itself(destination)
    there = source.below()
    trees = [name.removesuffix(RECORD) for name in there if name.endswith(f"/{RECORD}")]
    if str(destination).startswith(f"{source}/"):
        trees.append(f"{str(destination).removeprefix(f'{source}/')}/")
    suffixes = image_suffixes()
    hidden = [name for name in there if any(part.startswith(".") for part in name.split("/"))]
    names = {name for name in there if has_suffix(name, suffixes) and not name.startswith(tuple(trees))} - {*hidden}
    return source, [PurePath(name) for name in sorted(names, key=natural_key)]


def _itself(destination: Folder) -> UsageError:
    return UsageError(f"{destination} is the source itself; choose another DST")


def target_names(names: Iterable[PurePath], kind: str) -> dict[PurePath, str]:
    """The name of what is made from each source, all different, also where upper and lower case are one.

    Sources that differ in their ending only keep it: a.bmp and a.tif become a.bmp.JPEG and a.tif.JPEG.
    """
    names = list(names)
    stems = Counter(_folded(name.with_suffix("")) for name in names)
    kept = [name for name in names if name.suffix.lower() in _SAME_FORMAT[kind]]
    targets = {name: name.as_posix() for name in kept}
    taken = {_folded(name) for name in kept}
    for name in names:
        if name in targets:
            continue
        stem = name.with_suffix("").as_posix() if stems[_folded(name.with_suffix(""))] == 1 else name.as_posix()
        target = stem + SUFFIXES[kind]
        while target.casefold() in taken:  # say a.bmp.JPEG is there, too
            stem += "_"
            target = stem + SUFFIXES[kind]
        taken.add(target.casefold())
        targets[name] = target
    return targets


def _folded(name: PurePath) -> str:
    return name.as_posix().casefold()


def _outside(folder: Path, files: list[Path]) -> list[Path]:
    inside: dict[Path, bool] = {}
    real = os.path.realpath(folder)
    for parent in {file.parent for file in files}:
        place = os.path.realpath(parent)
        inside[parent] = place == real or place.startswith(os.path.join(real, ""))
    return [file for file in files if not inside[file.parent]]


def _limited(names: list[PurePath] | list[Path], limit: int | None) -> list[PurePath]:
    seen: Counter[str] = Counter()
    taken: list[PurePath] = []
    for name in names:
        label = name.parts[0] if len(name.parts) > 1 else ""
        seen[label] += 1
        if limit is None or seen[label] <= limit:
            taken.append(name)
    return taken
