"""Corrupt one image: read it, apply every requested corruption, write the files that are missing."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.corruptions import corrupt
from remtta.corruptions.choices import JPEG_QUALITY, CorruptOptions
from remtta.corruptions.filters import MAX_SIDE
from remtta.corruptions.parameters import parameter_set_of
from remtta.corruptions.source_images import SourceImage
from remtta.errors import FrameError, RemttaError
from remtta.files import write_atomically, writing
from remtta.streams.images import load_image

_SHORT_SIDE_TO_CROP = 256 / 224  # as ImageNet-C's images were prepared

_LONGEST_RESIZED = 8  # short sides; otherwise a line one pixel high would be resized to millions of pixels


_ENDS = {"jpeg": b"\xff\xd9", "png": b"\0\0\0\0IEND\xaeB`\x82"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one image."""

    name: str  # its path below the source
    written: int = 0  # files written now
    kept: int = 0  # files that existed already
    error: str | None = None  # why it could not be read, if so
    complete: bool = True  # False if a stop left files unwritten


def corrupt_file(image: SourceImage, destination: Path, options: CorruptOptions, stopped: Callable[[], int]) -> Outcome:
    """Write an image's missing files, until `stopped`, which is called before every file, returns true. Raise
    OutputError if a file cannot be written; RemttaError if the image cannot be corrupted, e.g. for lack of memory.
    """
    ways = [(name, severity) for name in options.corruptions for severity in options.severities]
    missing = [(name, severity) for name, severity in ways if not _is_there(image, destination, name, severity)]
    kept = len(ways) - len(missing)
    if not missing:
        return Outcome(image.name, kept=kept)
    try:
        pixels = prepare(load_image(image.path), options.size)
        if max(pixels.size) > MAX_SIDE:
            raise FrameError(f"{pixels.width}x{pixels.height}: sides may have up to {MAX_SIDE} pixels")
    except FrameError as error:
        return Outcome(image.name, kept=kept, error=str(error))
    kind = file_format(pixels, options)
    for done, (name, severity) in enumerate(missing):
        if stopped():
            return Outcome(image.name, done, kept, complete=False)
        corrupted = _corrupted(image, pixels, name, severity, options)
        _write(corrupted, kind, destination / name / str(severity) / image.targets[kind])
    return Outcome(image.name, len(missing), kept)


def prepare(image: Image.Image, size: int | None) -> Image.Image:
    """Resize and centre-crop as ImageNet-C does, if a size is given."""
    if size is None:
        return image
    short_side = min(image.size)
    image = _centre(image, _LONGEST_RESIZED * short_side)
    sides = [max(size, round(side * size * _SHORT_SIDE_TO_CROP / short_side)) for side in image.size]
    return _centre(image.resize((sides[0], sides[1]), Image.Resampling.BILINEAR), size)


def _centre(image: Image.Image, largest: int) -> Image.Image:
    """Crop the centre to at most `largest` pixels per side."""
    width, height = (min(side, largest) for side in image.size)
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


def _is_there(image: SourceImage, destination: Path, name: str, severity: int) -> bool:
    """Return whether a file exists and has its end marker, which a power failure or a cut copy may have lost."""
    folder = destination / name / str(severity)
    return any(_is_whole(folder / target, kind) for kind, target in image.targets.items())


def _is_whole(path: Path, kind: str) -> bool:
    end = _ENDS[kind]
    try:
        with open(path, "rb") as file:
            file.seek(-len(end), os.SEEK_END)
            return file.read() == end
    except OSError:  # absent, or shorter than the marker
        return False


def _corrupted(
    image: SourceImage, pixels: Image.Image, name: str, severity: int, options: CorruptOptions
) -> Image.Image:
    rng = generator_of(options.seed, name, severity, image.name)
    try:
        return corrupt(pixels, name, severity, rng, options.parameter_set)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise RemttaError(f"{image.path}: {name} at severity {severity} failed: {detail}") from error


def _write(image: Image.Image, kind: str, path: Path) -> None:
    packed = io.BytesIO()
    image.save(packed, kind, quality=JPEG_QUALITY)  # PNG has none, and ignores it
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_bytes(packed.getbuffer()), durable=False)
