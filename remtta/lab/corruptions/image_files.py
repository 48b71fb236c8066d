"""The files of one image: find it, read it, apply every requested corruption, write the files that are missing."""

from __future__ import annotations

import hashlib
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from PIL import Image

from remtta.errors import FrameError, RemttaError, UsageError
from remtta.files import MANIFEST, write_atomically, writing
from remtta.lab.corruptions import corrupt
from remtta.lab.corruptions.blur import MAX_SIDE
from remtta.lab.corruptions.options import JPEG_QUALITY, CorruptOptions
from remtta.lab.corruptions.parameters import parameter_set_of
from remtta.streams.images import image_suffixes, load_image
from remtta.streams.listing import list_files, log_ignored, none_but

_SHORT_SIDE_TO_CROP = 256 / 224  # as ImageNet-C's images were prepared
_MAX_ASPECT_RATIO = 8  # otherwise a line one pixel high would be resized to millions of pixels


class _Format(NamedTuple):
    suffix: str  # of the files written
    kept_suffixes: tuple[str, ...]  # a source with one of these keeps its name
    end_marker: bytes  # of a whole file


_FORMATS = {
    "jpeg": _Format(".JPEG", (".jpg", ".jpeg"), b"\xff\xd9"),
    "png": _Format(".png", (".png",), b"\0\0\0\0IEND\xaeB`\x82"),
}


@dataclass(frozen=True)
class SourceImage:
    """One image to corrupt."""

    path: Path
    name: str  # its path below the source folder, with forward slashes; part of its seed
    targets: dict[str, str]  # format to path of the corrupted file, below the folder of a corruption and severity


@dataclass(frozen=True)
class Outcome:
    """The outcome of one image."""

    name: str  # its path below the source
    written: int = 0  # files written now
    kept: int = 0  # files that existed already
    error: str | None = None  # why it could not be read, if so
    complete: bool = True  # False if a stop left files unwritten


def find_images(source: Path, destination: Path, limit: int | None = None) -> list[SourceImage]:
    """Return the images in a folder and its subfolders in natural order, or the single image `source`.

    Trees that remtta corrupt made earlier are left out. The limit is per class (the folders in `source`). Raise
    UsageError if `source` does not exist or holds no images, or `destination` is or lies in it.
    """
    if not os.path.exists(source):
        raise UsageError(f"{source}: no such file or folder")
    ignored: Counter[str] = Counter()
    if source.is_file():
        root, names = source.parent, [PurePath(source.name)]
    else:
        if Path(os.path.realpath(destination)).is_relative_to(os.path.realpath(source)):
            raise UsageError(f"{destination} is the source itself or lies in it; choose another DST")
        files = list_files(source, image_suffixes(), "name", ignored)
        root, names = source, [file.relative_to(source) for file in files]
        folders = {parent for name in names for parent in name.parents[:-1]}
        trees = {folder for folder in folders if (source / folder / MANIFEST).is_file()}
        names = [name for name in names if trees.isdisjoint(name.parents)]
    if not names:
        raise UsageError(f"{source}: {none_but(ignored, 'images')} in this folder or below it")
    log_ignored(source, ignored)
    targets = {format: target_names(names, format) for format in _FORMATS}
    return [
        SourceImage(root / name, name.as_posix(), {format: targets[format][name] for format in _FORMATS})
        for name in _first_of_each_class(names, limit)
    ]


def _first_of_each_class(names: Iterable[PurePath], limit: int | None) -> list[PurePath]:
    seen: Counter[str] = Counter()
    first: list[PurePath] = []
    for name in names:
        label = name.parts[0] if len(name.parts) > 1 else ""
        seen[label] += 1
        if limit is None or seen[label] <= limit:
            first.append(name)
    return first


def target_names(names: Iterable[PurePath], format: str) -> dict[PurePath, str]:
    """Return a target name for each source, unique even on case-insensitive file systems.

    Sources that differ only in their suffix keep it: a.bmp and a.tif become a.bmp.JPEG and a.tif.JPEG.
    """
    names, (suffix, kept_suffixes, _) = list(names), _FORMATS[format]
    stems = Counter(_folded(name.with_suffix("")) for name in names)
    targets = {name: name.as_posix() for name in names if name.suffix.lower() in kept_suffixes}
    taken = {_folded(name) for name in targets}
    for name in names:
        if name in targets:
            continue
        unsuffixed = name.with_suffix("")
        stem = unsuffixed.as_posix() if stems[_folded(unsuffixed)] == 1 else name.as_posix()
        while (stem + suffix).casefold() in taken:  # e.g. a.bmp.JPEG exists, too
            stem += "_"
        targets[name] = stem + suffix
        taken.add(targets[name].casefold())
    return targets


def _folded(name: PurePath) -> str:
    return name.as_posix().casefold()


def corrupt_file(image: SourceImage, destination: Path, options: CorruptOptions, stopped: Callable[[], int]) -> Outcome:
    """Write an image's missing files, until `stopped`, which is called before every file, returns true. Raise
    OutputError if a file cannot be written; RemttaError if the image cannot be corrupted, e.g. for lack of memory.
    """
    requested = [(name, severity) for name in options.corruptions for severity in options.severities]
    missing = [(name, severity) for name, severity in requested if not _is_written(image, destination, name, severity)]
    kept = len(requested) - len(missing)
    if not missing:
        return Outcome(image.name, kept=kept)
    try:
        pixels = prepare(load_image(image.path), options.size)
        if max(pixels.size) > MAX_SIDE:
            raise FrameError(f"{pixels.width}x{pixels.height}: sides may have up to {MAX_SIDE} pixels")
    except FrameError as error:
        return Outcome(image.name, kept=kept, error=str(error))
    format = file_format(pixels, options)
    for written, (name, severity) in enumerate(missing):
        if stopped():
            return Outcome(image.name, written, kept, complete=False)
        rng = generator_of(options.seed, name, severity, image.name)
        try:
            corrupted = corrupt(pixels, name, severity, rng, options.parameter_set)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}".removesuffix(": ")
            raise RemttaError(f"{image.path}: {name} at severity {severity} failed: {detail}") from error
        corrupted.save(encoded := io.BytesIO(), format, quality=JPEG_QUALITY)  # PNG has none, and ignores it
        path = destination / name / str(severity) / image.targets[format]
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, partial(Path.write_bytes, data=encoded.getbuffer()), durable=False)
    return Outcome(image.name, len(missing), kept)


def prepare(image: Image.Image, size: int | None) -> Image.Image:
    """Resize and centre-crop as ImageNet-C does, if a size is given."""
    if size is None:
        return image
    short_side = min(image.size)
    image = _centre_crop(image, _MAX_ASPECT_RATIO * short_side)
    width, height = (max(size, round(side * size * _SHORT_SIDE_TO_CROP / short_side)) for side in image.size)
    return _centre_crop(image.resize((width, height), Image.Resampling.BILINEAR), size)


def _centre_crop(image: Image.Image, max_side: int) -> Image.Image:
    width, height = (min(side, max_side) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def file_format(image: Image.Image, options: CorruptOptions) -> str:
    """Return "jpeg" or "png"."""
    if options.format != "auto":
        return options.format
    parameter_set = options.parameter_set or parameter_set_of(min(image.size))
    return "png" if parameter_set == "cifar" else "jpeg"


def generator_of(seed: int, corruption: str, severity: int, name: str) -> np.random.Generator:
    """Return the random generator of one file: the same in every run, order and process."""
    key = f"{seed}/{corruption}/{severity}/{name}".encode("utf-8", "surrogateescape")
    return np.random.default_rng(int.from_bytes(hashlib.sha256(key).digest()))


def _is_written(image: SourceImage, destination: Path, name: str, severity: int) -> bool:
    """Return whether a file exists and has its end marker, which a power failure or a cut copy may have lost."""
    folder = destination / name / str(severity)
    return any(_ends_in(folder / target, _FORMATS[format].end_marker) for format, target in image.targets.items())


def _ends_in(path: Path, marker: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            file.seek(-len(marker), os.SEEK_END)
            return file.read() == marker
    except OSError:  # absent, or shorter than the marker
        return False
