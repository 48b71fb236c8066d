"""Datasets with numbered classes and a fixed order: arrays, stored streams, and lists."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from remtta.errors import FrameError, StreamError, UsageError
from remtta.lab.corruptions.parameters import SEVERITIES
from remtta.lab.evaluation.class_maps import composed, numbered_once, restricted_set, wnids
from remtta.lab.evaluation.domains import DEFAULT_SEVERITY, Dataset, Domain, image_sizes, wanted_domains
from remtta.lab.evaluation.label_files import read_label_file, whole_number
from remtta.streams.listing import is_clutter, natural_key
from remtta.streams.pillow import formats

LABELS = "labels.npy"
_IMAGE, _CLASS = ".input.jpg", ".output.cls"
_LONGEST_CLASS = 20  # bytes
_FIRST = 10  # members of an archive that show whether it is a stream

_log = logging.getLogger(__name__)


def _check_labels(labels: np.ndarray, num_classes: int, path: Path) -> None:
    unknown = labels[(labels < 0) | (labels >= num_classes)]
    if len(unknown):
        raise UsageError(f"{path} names class {unknown[0]}, but the model has {num_classes}; see --num-classes")


# --- CIFAR-C: <corruption>.npy with the five severities in sequence, and labels.npy --------------------------------


def open_arrays(
    root: Path,
    domains: Sequence[str] | None,
    severities: Sequence[int] | None,
    num_classes: int,
    limit: int | None,
    *,
    complete: bool,
) -> Dataset:
    """Open severities of arrays, 5 by default, with at most `limit` images of each. Raise UsageError if there is no
    array, a file is not an array, has a wrong shape, or contains a class that the model lacks; StreamError if a file
    cannot be read.

    `domains` and `complete` are those of `open_dataset`.
    """
    arrays = {path.stem: path for path in root.glob("*.npy") if path.name != LABELS and not is_clutter(path.name)}
    if not arrays:
        raise UsageError(f"{root} has {LABELS} but no <corruption>.npy")
    names = wanted_domains(root, arrays, domains, complete=complete, by_severity=True)
    labels = _load_array(root / LABELS)
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise UsageError(f"{root / LABELS} must hold one whole number per image, got {labels.dtype} of {labels.shape}")
    labels = labels.astype(np.int64)
    _check_labels(labels, num_classes, root / LABELS)
    if 2 * (labels.max() + 1) <= num_classes:
        _log.warning("%s has classes 0 to %d, but the model has %d classes", root / LABELS, labels.max(), num_classes)
    opened: list[Domain] = []
    sizes: Counter[tuple[int, int]] = Counter()
    for path in (arrays[name] for name in names):
        rows, (_, height, width, _) = _rows_per_severity(path, labels), _load_array(path).shape
        count = min(rows, limit or rows)
        for severity in severities or (DEFAULT_SEVERITY,):
            start = (severity - 1) * rows
            sources = [f"{path}[{row}]" for row in range(start, start + count)]
            opened.append(Domain(path.stem, severity, sources, labels[:count], partial(_load_row, path, start)))
            sizes[width, height] += count
    return Dataset(root, "CIFAR-C arrays", opened, "number", np.unique(labels).tolist(), sizes)


def _rows_per_severity(path: Path, labels: np.ndarray) -> int:
    pixels = _load_array(path)
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or len(pixels) % len(SEVERITIES):
        raise UsageError(
            f"{path} must hold 5 severities of uint8 images (5 N, H, W, 3), got {pixels.dtype} of {pixels.shape}"
        )
    rows = len(pixels) // len(SEVERITIES)
    if len(labels) not in (rows, len(pixels)):
        raise UsageError(f"{path} has {len(pixels)} images, but {LABELS} has {len(labels)} labels")
    if (labels.reshape(-1, rows) != labels[:rows]).any():
        raise UsageError(
            f"{LABELS} differs between the fifths of {path}, which must hold the same images at severities 1 to 5"
        )
    return rows


def _load_row(path: Path, start: int, position: int) -> Image.Image:
    return Image.fromarray(np.ascontiguousarray(_load_array(path)[start + position]))


def _load_array(path: Path) -> np.ndarray:
    try:
        return np.lib.format.open_memmap(path, mode="r")  # np.load also opens archives
    except OSError as error:
        raise StreamError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from error


# --- CCC (Press et al., NeurIPS 2023, arXiv:2306.05401): folders such as ---------------------------------------------
# `baseline_20_transition+speed_1000_seed_43` of `serial_00000.tar`, ..., whose members are `<key>.input.jpg` and
# `<key>.output.cls`, the class number as text.


class _Member(NamedTuple):
    """An image in a tar file, and its class."""

    path: Path
    key: str
    start: int
    num_bytes: int
    label: int


def _load_member(members: Sequence[_Member], position: int) -> Image.Image:
    member = members[position]
    try:
        with open(member.path, "rb") as file:
            file.seek(member.start)
            return Image.open(io.BytesIO(file.read(member.num_bytes)), formats=formats()).convert("RGB")
    except Exception as error:  # Pillow's decoders raise many types on damaged data
        raise FrameError(f"cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def find_shards(root: Path) -> list[Path]:
    """Return the tar files of a stored stream in natural order; none if the first is another archive, as a tree's."""
    shards = [path for path in root.glob("*.tar") if not is_clutter(path.name)]
    shards.sort(key=lambda path: natural_key(path.name))
    if shards:
        with contextlib.suppress(OSError, tarfile.TarError), tarfile.open(shards[0]) as tar:  # reported when it is read
            if not any(member.name.endswith((_IMAGE, _CLASS)) for member in islice(tar, _FIRST)):
                return []
    return shards


def open_shards(root: Path, shards: Sequence[Path], num_classes: int, limit: int | None) -> Dataset:
    """Open a stored stream, or its first `limit` images; sizes are taken from the first image of each file. Raise
    UsageError if it holds no images, or classes that the model lacks; StreamError if a file cannot be read.
    """
    members = list(islice((member for shard in shards for member in _members(shard)), limit))
    if not members:
        raise UsageError(f"{root} has tar files, but none with <key>{_IMAGE} and <key>{_CLASS}, as CCC's have")
    labels = np.array([member.label for member in members], dtype=np.int64)
    _check_labels(labels, num_classes, root)
    first = {member.path: member for member in reversed(members)}
    try:
        sizes = {path: _load_member([member], 0).size for path, member in first.items()}
    except FrameError as error:
        raise StreamError(f"{next(iter(first))}: its first image {error}") from error
    sources = [f"{member.path}[{member.key}]" for member in members]
    domain = Domain(root.resolve().name, None, sources, labels, partial(_load_member, members))
    counts = Counter(sizes[member.path] for member in members)
    return Dataset(root, "CCC shards", [domain], "number", np.unique(labels).tolist(), counts)


def _members(path: Path) -> Iterator[_Member]:
    """Yield the images of a tar file with their classes, which precede or follow them."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path, "r:") as tar:  # not compressed, since images are read by their position in the file
            for member in tar:
                key = member.name.removesuffix(_IMAGE).removesuffix(_CLASS)
                if member.name.endswith(_IMAGE):
                    images[key] = member.offset_data, member.size
                elif member.name.endswith(_CLASS):
                    content = tar.extractfile(member)
                    labels[key] = int(content.read(_LONGEST_CLASS)) if content else -1
                if key in images and key in labels:
                    yield _Member(path, key, *images.pop(key), labels.pop(key))
    except ValueError as error:
        raise UsageError(f"{path}: a class is not a number: {error}") from error
    except (OSError, tarfile.TarError) as error:
        raise StreamError(f"{path} cannot be read as a tar file, uncompressed: {error}") from error


# --- Lists: a path and a class per line ------------------------------------------------------------------------------


def open_list(file: Path, root: Path, num_classes: int, names: Sequence[str] | None, limit: int | None) -> Dataset:
    """Open the images of a list, or its first `limit`, as one domain in the order of the list; raise UsageError if the
    file cannot be read, an image is missing, or a class is unknown.

    Args:
        file: A line per image with its path and its class, a number, a wnid or a name; see `read_label_file`.
        root: Folder to which relative paths refer.
    """
    entries = read_label_file(file, "--labels-file", lambda image: os.path.isfile(root / image))
    numbers = wnids(num_classes) | numbered_once([composed(name) for name in names or ()])
    class_texts = [label for _, label in entries]
    labels = [numbers.get(composed(text), -1) if (n := whole_number(text)) is None else n for text in class_texts]
    for text, label in zip(class_texts, labels, strict=True):
        if not 0 <= label < num_classes:
            raise UsageError(
                f'--labels-file: {file}: the model has no class "{text}"; it has {num_classes} classes, from 0; '
                "--labels gives their names (if a path has a comma, separate path and class by a tab)"
            )
    sources = [str(root / image) for image, _ in entries[:limit]]
    if missing := [source for source in sources if not Path(source).is_file()]:
        raise UsageError(f"--labels-file: {len(missing)} images of {file} are missing, such as {missing[0]}")
    domain = Domain(file.stem, None, sources, np.array(labels[:limit], dtype=np.int64))
    class_numbers = sorted(set(labels))
    return Dataset(
        root=root,
        layout=f"images listed in {file}",
        domains=[domain],
        classes=" or ".join(sorted({"class name" if whole_number(text) is None else "number" for text in class_texts})),
        class_numbers=class_numbers,
        sizes=image_sizes(sources),
        restricted_to=restricted_set(class_texts) if len(class_numbers) < num_classes else None,
    )
