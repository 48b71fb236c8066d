"""Stored streams of CCC: tar files of images that come in this order, two corruptions on each.

Continually Changing Corruptions (Press et al., NeurIPS 2023, arXiv:2306.05401) are folders such as
`baseline_20_transition+speed_1000_seed_43` of `serial_00000.tar`, `serial_00001.tar`, ..., whose members are
`<key>.input.jpg` and `<key>.output.cls`, the class number as text.
"""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from remtta.errors import FrameError, StreamError, UsageError
from remtta.evaluation.domains import Domain
from remtta.streams.images import natural_key

_IMAGE, _CLASS = ".input.jpg", ".output.cls"


@dataclass(frozen=True)
class _Sample:
    """An image in a tar file, and its class."""

    path: Path
    key: str
    start: int
    num_bytes: int
    label: int

    def load(self) -> Image.Image:
        """Decode it to RGB.

        Raises:
            FrameError: If it cannot be.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                return Image.open(io.BytesIO(file.read(self.num_bytes))).convert("RGB")
        except Exception as error:  # Pillow's decoders raise many types on damaged data
            raise FrameError(f"cannot be decoded: {str(error).strip() or type(error).__name__}") from error


def find_shards(root: Path) -> list[Path]:
    """The tar files right in a folder, in natural order."""
    return sorted(root.glob("*.tar"), key=lambda path: natural_key(path.name))


def shard_domain(
    root: Path, shards: list[Path], num_classes: int, limit: int | None
) -> tuple[Domain, Counter[tuple[int, int]]]:
    """A stored stream, or its first `limit` images, as one domain; and their sizes, by the first image of each file.

    Raises:
        UsageError: If it holds no images, or classes that the model does not have.
        StreamError: If a file cannot be read.
    """
    samples = list(islice((sample for shard in shards for sample in _samples(shard)), limit))
    if not samples:
        raise UsageError(f"{root} has tar files, but none with <key>{_IMAGE} and <key>{_CLASS}, as CCC's have")
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    if not 0 <= labels.min() <= labels.max() < num_classes:
        raise UsageError(f"{root} names class {labels.max()}, but the model has {num_classes}; see --num-classes")
    first = {sample.path: sample for sample in reversed(samples)}
    try:
        sizes = {path: sample.load().size for path, sample in first.items()}
    except FrameError as error:
        raise StreamError(f"{next(iter(first))}: its first image {error}") from error
    sources = [f"{sample.path}[{sample.key}]" for sample in samples]
    domain = Domain(root.resolve().name, None, sources, labels, partial(_load, samples))
    return domain, Counter(sizes[sample.path] for sample in samples)


def _load(samples: list[_Sample], position: int) -> Image.Image:
    return samples[position].load()


def _samples(path: Path) -> Iterator[_Sample]:
    """Images with their classes, which come right before or behind them."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with tarfile.open(path) as tar:
            for member in tar:
                key = member.name.removesuffix(_IMAGE).removesuffix(_CLASS)
                if member.name.endswith(_IMAGE):
                    images[key] = member.offset_data, member.size
                elif member.name.endswith(_CLASS):
                    content = tar.extractfile(member)
                    labels[key] = int(content.read()) if content else -1
                if key in images and key in labels:
                    yield _Sample(path, key, *images.pop(key), labels.pop(key))
    except ValueError as error:
        raise UsageError(f"{path}: a class is no number: {error}") from error
    except (OSError, tarfile.TarError) as error:
        raise StreamError(f"{path} cannot be read: {error}") from error
