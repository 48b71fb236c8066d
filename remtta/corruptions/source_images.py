"""Which images a folder holds, and what their corrupted files are called."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath

from remtta.corruptions.tree_record import RECORD
from remtta.errors import UsageError
from remtta.streams.images import image_suffixes, list_files

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

    path: Path
    name: str
    targets: dict[str, str]


def find_images(source: Path, destination: Path, limit: int | None = None) -> list[SourceImage]:
    """The images of a folder and below it, in natural order, or the one that `source` is.

    Args:
        source: Image or folder; what lies in a tree that was made by remtta corrupt before is left out.
        destination: Where the corrupted images will be.
        limit: Take the first so many of every class (the folders in `source`).

    Raises:
        UsageError: If there is no such source, it holds no images, or the destination is it or lies in it.
    """
    if not os.path.exists(source):
        raise UsageError(f"{source}: no such file or folder")
    if source.is_file():
        names = [PurePath(source.name)]
        root = source.parent
    else:
        if _is_within(destination, source):
            raise UsageError(f"{destination} is the source itself or lies in it; choose another DST")
        files = list_files(source, image_suffixes(), "name")
        for tree in (record.parent for record in source.rglob(RECORD) if record.parent != source):
            files = _outside(tree, files)
        names = [file.relative_to(source) for file in files]
        root = source
    if not names:
        raise UsageError(f"{source}: no images in this folder or below it")
    targets = {kind: target_names(names, kind) for kind in SUFFIXES}
    return [
        SourceImage(root / name, name.as_posix(), {kind: targets[kind][name] for kind in SUFFIXES})
        for name in _limited(names, limit)
    ]


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
    inside = {parent: _is_within(parent, folder) for parent in {file.parent for file in files}}
    return [file for file in files if not inside[file.parent]]


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies in it, wherever links lead."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _limited(names: list[PurePath] | list[Path], limit: int | None) -> list[PurePath]:
    seen: Counter[str] = Counter()
    taken: list[PurePath] = []
    for name in names:
        label = name.parts[0] if len(name.parts) > 1 else ""
        seen[label] += 1
        if limit is None or seen[label] <= limit:
            taken.append(name)
    return taken
