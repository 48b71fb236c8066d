"""Clean images of the source domain, which some methods and the accuracy estimate learn from."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from remtta.errors import StreamError, UsageError
from remtta.methods.table import METHOD_TABLE
from remtta.models.preprocessing import Preprocessing
from remtta.streams.images import image_suffixes
from remtta.streams.listing import list_files
from remtta.streams.prefetch import DecodedFrame, prefetch
from remtta.streams.sources import open_stream

FEW_IMAGES = 32  # FOA needs no more
SOURCE_BATCH = 64
"""Images per batch; EATA's squared gradients depend on this size."""

_ORDER_SEED = 0  # folders are sorted by class, and methods may stop after a few thousand images

_log = logging.getLogger("remtta")


def check_source_data(methods: Iterable[str], source_data: str | Path | None, *, calibrates: bool = False) -> None:
    """Raise UsageError if methods lack their source images, or if nothing uses the source images given."""
    names = list(methods)
    learners = [name for name in names if name in METHOD_TABLE and METHOD_TABLE[name].method.needs_source_data]
    if learners and source_data is None:
        raise UsageError(
            f"{' and '.join(learners)} {'learns' if len(learners) == 1 else 'learn'} from clean images of the source "
            "domain first; name a folder of them with --source-data FOLDER"
        )
    if source_data is not None and not learners and not calibrates:
        raise UsageError(
            f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not use source images; leave --source-data out "
            "(remtta adapt also calibrates --estimate by them; remtta export --adaptive measures batch norms)"
        )
    if source_data is not None and not Path(source_data).exists():
        raise UsageError(f"--source-data: {source_data}: no such file or folder")
    if calibrates and source_data is not None and not Path(source_data).is_dir():
        raise UsageError(f"--estimate is calibrated on images, and {source_data} is not a folder of images")


def source_files(folder: Path) -> list[Path]:
    """Return the images in a folder or below it; raise UsageError if it does not exist, or holds none."""
    if not folder.is_dir():
        raise UsageError(f"--source-data: {folder} is neither a folder of images nor a .safetensors file of statistics")
    files = list_files(folder, image_suffixes(), "name")
    if not files:
        raise UsageError(f"--source-data: no images in {folder} or below it")
    return files


def clean_batches(
    files: Sequence[Path],
    preprocessing: Preprocessing,
    device: torch.device,
    most: int | None,
    wait: Callable[[], None],
    *,
    transform: Callable[[Image.Image], Tensor] | None = None,
) -> Generator[Tensor]:
    """Yield at most `most` preprocessed images in batches (B, 3, H, W), in a fixed order that mixes the classes; raise
    StreamError if none of them can be read.

    Args:
        transform: From an RGB image to a uint8 tensor (3, H, W), called by several threads; None: the model's.
    """
    transform = transform or preprocessing.transform()
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(_ORDER_SEED)).tolist()
    frames = open_stream([files[number] for number in order]).frames
    found = False
    with contextlib.closing(prefetch(frames, transform, ahead=2 * SOURCE_BATCH, wait=wait)) as decoded:
        images = itertools.islice(_readable(decoded), most)
        while batch := list(itertools.islice(images, SOURCE_BATCH)):
            found = True
            yield preprocessing.normalise(torch.stack(batch).to(device))
    if not found:
        raise StreamError(f"--source-data: no readable image ({len(files)} failed)")


def fitting_transform(preprocessing: Preprocessing) -> Callable[[Image.Image], Tensor]:
    """Return a model's transform, but for images of its input size, which it neither resizes nor crops."""
    as_usual, uncropped = preprocessing.transform(), dataclasses.replace(preprocessing, crop_pct=1.0).transform()
    height, width = preprocessing.input_size
    return lambda image: uncropped(image) if image.size == (width, height) else as_usual(image)


def _readable(frames: Iterable[DecodedFrame]) -> Iterator[Tensor]:
    for frame in frames:
        if frame.image is None:
            _log.warning("skipped the source image %s: %s", frame.source, frame.error)
        else:
            yield frame.image
