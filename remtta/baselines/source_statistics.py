"""Statistics of clean source images, which are computed before the first batch and cached."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from remtta.errors import CheckpointError, OutputError, UsageError, counted
from remtta.files import cache_folder, remove_leftovers
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Config, Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.source_data import FEW_IMAGES, clean_batches, fitting_transform, source_files
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.models.tensor_files import UNREADABLE, json_sha256, read_tensors, save_tensors, state_sha256, tensors_sha256

_FORMAT_VERSION = "2"
_SUFFIX = ".safetensors"
_HEADER = "source_statistics"

_log = logging.getLogger("remtta")


class SourceStatistics(Method[Config]):
    """A method that needs statistics of clean source images before the first batch.

    Attributes:
        statistics: Statistics of source images; empty until `use_source`, and not part of the state.
        max_source_images: Number of source images used at most; None for all.
    """

    needs_source_data = True
    source_settings: ClassVar[tuple[str, ...] | None] = None  # those that `source_statistics` depends on; None for all
    max_source_images: int | None = None

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        self.statistics: Mapping[str, Tensor] = {}

    @abstractmethod
    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return statistics on the CPU of one or more batches of transformed source images (B, 3, H, W)."""

    def predict(self, images: Tensor, *, learn: bool = False, counted: bool = True, latency: bool = False) -> Tensor:
        if not self.statistics:
            raise UsageError(
                f"{type(self).__name__} learns from clean images of the source domain first: name a folder "
                "of them with --source-data FOLDER, or give use_source what learn_source returns"
            )
        return super().predict(images, learn=learn, counted=counted, latency=latency)

    @torch.inference_mode(False)
    def learn_source(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return what the method learns from preprocessed source images (B, 3, H, W), for `use_source`; raise
        ValueError if there are none.
        """
        transformed = map(self.model.transform, batches)
        first = next(transformed, None)
        if first is None:
            raise ValueError("there are no source images to learn from")
        return self.source_statistics(itertools.chain([first], transformed))

    @torch.inference_mode(False)
    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Adapt with the tensors returned by `learn_source`, of this or an equal model."""
        self.statistics = {name: tensor.to(self.model.device) for name, tensor in statistics.items()}

    def learn_from_source(
        self,
        source_data: str | Path,
        *,
        name: str,
        preprocessing: Preprocessing | None = None,
        fitting_as_they_are: bool = False,
        wait: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """Use the statistics of clean source images; the model is at its source weights.

        The statistics of a folder (searched recursively) are cached, and reused as long as model, method, preprocessing
        and the folder's files stay the same.

        Returns:
            The "source_data" given, "path" and "tensors_sha256" of the statistics, and the number of "images" used.

        Raises:
            UsageError: If the folder does not exist, or holds no images.
            StreamError: If none of the images can be read.
            CheckpointError: If a given file is missing or damaged, or was made for something else.
            OutputError: If the cache cannot be written.
        """
        model = self.model.model
        preprocessing = preprocessing or preprocessing_of(model)
        made_for = self._made_for(name, preprocessing)
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
            made_for["files_sha256"] = json_sha256(
                [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found_files]
            )
            key = json_sha256([made_for, repr(model)])  # equal weights can have other activations
            path = cache_folder() / f"{name}-{key[:32]}{_SUFFIX}"
            if cached := _cached(path):
                header, tensors = cached
                _log.info("%s uses the statistics of %s from an earlier run: %s", name, source_data, path)
            else:
                _log.info("%s computes statistics of source images (%d files), once", name, len(files))
                device, most = self.model.device, self.max_source_images
                transform = fitting_transform(preprocessing) if fitting_as_they_are else None
                batches = clean_batches(files, preprocessing, device, most, wait, transform=transform)
                header, tensors = _learned(self, path, made_for, batches)
        if header["images"] < FEW_IMAGES:
            _log.warning(
                "%s has statistics of only %s; a few hundred are better",
                name,
                counted(header["images"], "source image"),
            )
        self.use_source(tensors)
        return {
            "source_data": str(Path(source_data).absolute()),
            "path": str(path.absolute()),
            "tensors_sha256": header["tensors_sha256"],
            "images": header["images"],
        }

    def _made_for(self, name: str, preprocessing: Preprocessing) -> dict[str, Any]:
        """Return what the statistics depend on besides the images, as in a file's header."""
        settings = dataclasses.asdict(self.config)
        if settings["precision"] == "fp32":
            settings["precision"] = "auto"  # as in files of earlier versions
        return {
            "format_version": _FORMAT_VERSION,
            "model_sha256": state_sha256(self.model.model),
            "method": name,
            "settings": {key: settings[key] for key in self.source_settings or settings},
            "preprocessing": preprocessing.as_dict(),
        }


_Found = tuple[Mapping[str, Any], dict[str, Tensor]]
"""A file's header and tensors."""


def _learned(
    method: SourceStatistics[MethodConfig], path: Path, made_for: Mapping[str, Any], batches: Generator[Tensor]
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
