"""Clean images of the source domain, and the statistics that methods compute from them, which are cached."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from remtta.errors import CheckpointError, OutputError, StreamError, UsageError, counted
from remtta.files import cache_folder, remove_leftovers
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.models.tensor_files import UNREADABLE, json_sha256, read_tensors, save_tensors, state_sha256, tensors_sha256
from remtta.streams.images import image_suffixes, list_files
from remtta.streams.prefetch import DecodedFrame, prefetch
from remtta.streams.sources import open_stream

FEW_IMAGES = 32  # FOA needs no more
SOURCE_BATCH = 64
"""Images per batch for source statistics; EATA's squared gradients depend on this size."""

_FORMAT_VERSION = "2"
_SUFFIX = ".safetensors"
_HEADER = "source_statistics"
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
            f"none of {', '.join(names)} learns from source images; leave --source-data out (in remtta adapt it also "
            "calibrates --estimate)"
        )
    if source_data is not None and not Path(source_data).exists():
        raise UsageError(f"--source-data: {source_data}: no such file or folder")
    if calibrates and source_data is not None and not Path(source_data).is_dir():
        raise UsageError(f"--estimate is calibrated on images, and {source_data} is not a folder of images")


def learn_from_source(
    method: Method[MethodConfig],
    source_data: str | Path,
    *,
    name: str,
    preprocessing: Preprocessing | None = None,
    fitting_as_they_are: bool = False,
    wait: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Give a method, on a model at its source weights, the statistics of clean source images.

    The source data are a folder of images (searched recursively, no labels), or a file of statistics from an earlier
    run. The statistics of a folder are cached, and reused as long as model, method, preprocessing and the folder's
    files stay the same. The preprocessing is by default the model's own; with `fitting_as_they_are`, images of the
    input size are neither resized nor cropped. `wait` is called while images are decoded, and may raise to stop.

    Returns:
        The "source_data" given, "path" and "tensors_sha256" of the statistics, and the number of "images" used, for the
        records.

    Raises:
        UsageError: If the folder does not exist, or holds no images.
        StreamError: If none of the images can be read.
        CheckpointError: If a given file is missing or damaged, or was made for something else.
        OutputError: If the cache cannot be written.
    """
    model = method.model.model
    preprocessing = preprocessing or preprocessing_of(model)
    made_for = _made_for(model, name, method.config, preprocessing)
    if fitting_as_they_are:
        made_for["preprocessing"]["fitting"] = "as they are"
    path = Path(source_data)
    if path.suffix == _SUFFIX:
        header, tensors = _read(path)
        wanted = json.loads(json.dumps(made_for))  # as JSON would give it back
        if different := [key for key, value in wanted.items() if header.get(key) != value]:
            text = f"{path} was made with another {', '.join(different)}"
            raise CheckpointError(f"{text}; name the folder of source images instead")
        _log.info("%s uses the source statistics in %s", name, path)
    else:
        files = source_files(path)
        found_files = [(str(file.relative_to(path)), file.stat()) for file in files]
        made_for["files_sha256"] = json_sha256([(name, stat.st_size, stat.st_mtime_ns) for name, stat in found_files])
        key = json_sha256([made_for, repr(model)])  # equal weights can have other activations
        path = cache_folder() / f"{name}-{key[:32]}{_SUFFIX}"
        if cached := _cached(path):
            header, tensors = cached
            _log.info("%s uses the statistics of %s from an earlier run: %s", name, source_data, path)
        else:
            _log.info("%s computes statistics of source images (%d files), once", name, len(files))
            device, most = method.model.device, method.max_source_images
            batches = clean_batches(files, preprocessing, device, most, wait, fitting_as_they_are=fitting_as_they_are)
            header, tensors = _learned(method, path, made_for, batches)
    if header["images"] < FEW_IMAGES:
        _log.warning(
            "%s has statistics of only %s; a few hundred are better", name, counted(header["images"], "source image")
        )
    method.use_source(tensors)
    return {
        "source_data": str(Path(source_data).absolute()),
        "path": str(path.absolute()),
        "tensors_sha256": header["tensors_sha256"],
        "images": header["images"],
    }


_Found = tuple[Mapping[str, Any], dict[str, Tensor]]
"""A file's header and tensors."""


def _made_for(model: nn.Module, method: str, config: MethodConfig, preprocessing: Preprocessing) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    if settings["precision"] == "fp32":
        settings["precision"] = "auto"  # as in files of earlier versions
    mattering = settings if config.source_settings is None else config.source_settings
    return {
        "format_version": _FORMAT_VERSION,
        "model_sha256": state_sha256(model),
        "method": method,
        "settings": {name: settings[name] for name in mattering},
        "preprocessing": preprocessing.as_dict(),
    }


def source_files(folder: Path) -> list[Path]:
    """Return the images in a folder or below it; raise UsageError if it does not exist, or holds none."""
    if not folder.is_dir():
        raise UsageError(f"--source-data: {folder} is neither a folder of images nor a {_SUFFIX} file of statistics")
    files = list_files(folder, image_suffixes(), "name")
    if not files:
        raise UsageError(f"--source-data: no images in {folder} or below it")
    return files


def _learned(
    method: Method[MethodConfig], path: Path, made_for: Mapping[str, Any], batches: Generator[Tensor]
) -> _Found:
    """Compute a method's statistics from batches of clean images, and save them in the cache."""
    try:  # before the work, so that an unwritable cache is noticed first
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{path.parent} cannot be made: {error.strerror or error}"
        raise OutputError(f"{reason}; name a folder for source statistics with REMTTA_CACHE") from error
    sizes: list[int] = []

    def noted(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        return batch

    with contextlib.closing(batches):
        tensors = method.learn_source(map(noted, batches))
    header = {**made_for, "images": sum(sizes), "tensors_sha256": tensors_sha256(tensors)}
    # One entry, since safetensors writes several in any order: equal statistics give equal bytes.
    metadata = {_HEADER: json.dumps(header, sort_keys=True)}
    remove_leftovers(path.parent, (f"*{_SUFFIX}",), untouched_for_s=60.0)
    save_tensors(path, tensors, metadata, checksum=False)
    return header, tensors


def clean_batches(
    files: Sequence[Path],
    preprocessing: Preprocessing,
    device: torch.device,
    most: int | None,
    wait: Callable[[], None],
    *,
    fitting_as_they_are: bool = False,
) -> Generator[Tensor]:
    """Yield at most `most` preprocessed images in batches (B, 3, H, W), in a fixed order that mixes the classes; raise
    StreamError if none of them can be read.
    """
    as_usual = preprocessing.transform()
    uncropped = dataclasses.replace(preprocessing, crop_pct=1.0).transform() if fitting_as_they_are else as_usual
    height, width = preprocessing.input_size

    def transform(image: Image.Image) -> Tensor:
        return uncropped(image) if image.size == (width, height) else as_usual(image)

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


def _readable(frames: Iterable[DecodedFrame]) -> Iterator[Tensor]:
    for frame in frames:
        if frame.image is None:
            _log.warning("skipped the source image %s: %s", frame.source, frame.error)
        else:
            yield frame.image


def _cached(path: Path) -> _Found | None:
    """Return the cached file's content; None if it is missing or damaged."""
    if not path.exists():
        return None
    try:
        return _read(path)
    except CheckpointError as error:
        _log.warning("%s; the statistics are computed again", error)
        return None


def _read(path: Path) -> _Found:
    try:
        texts, tensors = read_tensors(path)
        header = json.loads(texts.get(_HEADER, "{}"))
    except UNREADABLE as error:
        raise CheckpointError(f"{path} is not a readable file of source statistics: {error}") from error
    if header.get("tensors_sha256") != tensors_sha256(tensors):
        raise CheckpointError(f"{path} holds no source statistics, or damaged ones")
    return header, tensors
