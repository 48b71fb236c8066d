"""Find the images of a folder, and name their corrupted files."""

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
"""Suffixes of the files written; a source that already has a suffix of that format keeps its name."""

_SAME_FORMAT = {"jpeg": frozenset({".jpg", ".jpeg"}), "png": frozenset({".png"})}


@dataclass(frozen=True)
class SourceImage:
    """One image to corrupt."""

    path: Path
    name: str  # its path below the source folder, with forward slashes; part of its seed
    targets: dict[str, str]  # format to path of the corrupted file, below the folder of a corruption and severity


def find_images(source: Path, destination: Path, limit: int | None = None) -> list[SourceImage]:
    """Return the images in a folder and its subfolders in natural order, or the single image `source`.

    Trees that remtta corrupt made earlier are left out. The limit is per class (the folders in `source`). Raise
    UsageError if `source` does not exist or holds no images, or `destination` is or lies in it.
    """
    if not os.path.exists(source):
        raise UsageError(f"{source}: no such file or folder")
    if source.is_file():
        names = [PurePath(source.name)]
        root = source.parent
    else:
        if Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
            raise UsageError(f"{destination} is the source itself or lies in it; choose another DST")
        files = list_files(source, image_suffixes(), "name")
        folders = {parent for file in files for parent in file.relative_to(source).parents[:-1]}
        trees = {folder for folder in folders if (source / folder / RECORD).is_file()}
        names = [name for file in files if trees.isdisjoint((name := file.relative_to(source)).parents)]
        root = source
    if not names:
        raise UsageError(f"{source}: no images in this folder or below it")
    targets = {kind: target_names(names, kind) for kind in SUFFIXES}
    return [
        SourceImage(root / name, name.as_posix(), {kind: targets[kind][name] for kind in SUFFIXES})
        for name in _limited(names, limit)
    ]


def target_names(names: Iterable[PurePath], kind: str) -> dict[PurePath, str]:
    """Return a target name for each source, unique even on case-insensitive file systems.

    Sources that differ only in their suffix keep it: a.bmp and a.tif become a.bmp.JPEG and a.tif.JPEG.
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
        while target.casefold() in taken:  # e.g. a.bmp.JPEG exists, too
            stem += "_"
            target = stem + SUFFIXES[kind]
        taken.add(target.casefold())
        targets[name] = target
    return targets


def _folded(name: PurePath) -> str:
    return name.as_posix().casefold()


def _limited(names: list[PurePath] | list[Path], limit: int | None) -> list[PurePath]:
    seen: Counter[str] = Counter()
    taken: list[PurePath] = []
    for name in names:
        label = name.parts[0] if len(name.parts) > 1 else ""
        seen[label] += 1
        if limit is None or seen[label] <= limit:
            taken.append(name)
    return taken
