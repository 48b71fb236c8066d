"""Write an adapted model as ONNX, PEFT or timm files, checked against torch; they appear together or not at all."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from remtta._version import __version__
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import norm_modules
from remtta.deltas.delta import Delta, apply_delta, save_weights
from remtta.errors import OutputError, RemttaError, UsageError, check_installed, counted, first_line, needed
from remtta.files import FolderLock, check_can_hold, check_not_input, write_atomically, writing
from remtta.formats.onnx_graph import OnnxGraph, read_graph
from remtta.formats.onnx_loading import ADAPTIVE
from remtta.formats.onnx_model import OnnxClassifier
from remtta.methods.pixels import flipped, random_box
from remtta.methods.source_data import clean_batches, source_files
from remtta.models.info import ModelInfo, model_info
from remtta.models.loading import load, load_model
from remtta.models.preprocessing import Preprocessing
from remtta.models.unwrapping import classifiers_of, config_of, custom_head
from remtta.options import ModelOptions

Format = Literal["onnx", "peft", "timm"]

TOLERANCE = 1e-4
"""Largest difference of a logit from torch's, relative to the largest logit if that exceeds 1."""

BATCHES = (1, 7)

_FEW_SOURCE_IMAGES = 100
_MOST_SOURCE_IMAGES = 512  # statistics of convolutions need no more
_ONNX_FILE, _PROVIDER = "model.onnx", "CPUExecutionProvider"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportableModel:
    """A model with a delta added."""

    model: nn.Module  # on the CPU, in float32
    base: Mapping[str, Tensor]  # the source weights
    info: ModelInfo  # the adapted model's
    delta: Delta
    inputs: Sequence[str | Path | None]  # files or folders of base and delta, if known

    @property
    def facts(self) -> dict[str, str]:
        """Origin and usage, as strings."""
        return {
            "remtta_version": __version__,
            "model": self.delta.model,
            "base_sha256": self.delta.base_sha256,
            "state_sha256": self.info.sha256,
            "delta_sha256": self.delta.file_sha256 or "",
            "method": self.delta.method,
            "frames": str(self.delta.frames),
            "updates": str(self.delta.updates),
            "preprocessing": json.dumps(self.info.preprocessing.as_dict()),
            "labels": json.dumps(list(self.info.labels or [])),
        }

    def images(self, count: int) -> Tensor:
        """Return normalised random images, the same each time."""
        generator = torch.Generator().manual_seed(count)
        return torch.randn(count, 3, *self.info.preprocessing.input_size, generator=generator)

    @torch.inference_mode()
    def check(self, program: str, predict: Callable[[Tensor], ArrayLike]) -> None:
        """Compare another program's logits (B, C) of images (B, 3, H, W) with torch's, for batches of 1 and 7; raise
        RemttaError if a difference, relative to the largest logit if that exceeds 1, is larger than `TOLERANCE`.
        """
        differences = []
        for count in BATCHES:
            images = self.images(count)
            expected = self.model(images).numpy()
            got = np.asarray(predict(images))
            if got.shape != expected.shape:
                raise RemttaError(
                    f"{program} returns {tuple(got.shape)} for {counted(count, 'image')}, torch {tuple(expected.shape)}"
                )
            differences.append(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
        worst = float(np.max(differences))  # unlike max(), keeps a NaN
        if not worst <= TOLERANCE:
            raise RemttaError(f"in {program} the logits differ from torch's by {worst:.1e}; nothing was exported")
        _log.info("%s: logits within %.1e of torch's", program, worst)


def adapted_model(delta: Delta, options: ModelOptions) -> ExportableModel:
    """Load the base of a delta by the options that `base_options` returned, and add the delta; raise RemttaError if the
    base cannot be loaded, or the delta does not fit.
    """
    model = load(options)
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply_delta(model, delta)
    inputs = [*options.files, delta.path]
    return ExportableModel(model, base, model_info(model), delta, inputs)


def save_onnx(adapted: ExportableModel, path: Path) -> None:
    """Write an ONNX file: normalised images (B, 3, H, W) to logits (B, C), for any B; an ONNX file keeps its own inputs
    and outputs. Raise UsageError if a package is missing, or the model is too large for one file; RemttaError if the
    model cannot be exported, or its logits differ.
    """
    if isinstance(adapted.model, OnnxClassifier):
        adapted.model.save(path, adapted.facts)
        return
    content = OnnxGraph(_to_onnx(adapted), path).content(adapted.facts)

    def write(temporary: Path) -> None:
        temporary.write_bytes(content)
        adapted.check("onnxruntime", OnnxClassifier(read_graph(temporary), None, [_PROVIDER], None))

    write_atomically(path, write)


def save_adapted_onnx(model: nn.Module, delta: Delta, path: Path) -> None:
    """Write a model to which a delta was added, on the CPU, as an ONNX file; raise as `save_onnx`."""
    save_onnx(ExportableModel(model, {}, model_info(model), delta, ()), path)


def source_model(options: ModelOptions) -> ExportableModel:
    """Load a model to export as it is; raise RemttaError if it cannot be loaded."""
    model = load(options)
    info = model_info(model)
    return ExportableModel(model, model.state_dict(), info, Delta({}, info.name, info.sha256, "source"), options.files)


def save_adaptive(adapted: ExportableModel, path: Path, source_data: Path | None = None) -> None:
    """Write an ONNX file that adapts itself as the method `fast`, checked against it; raise as `save_onnx`, and
    UsageError if source images are needless or missing.

    Args:
        source_data: Clean images, to measure the convolutions of an ONNX file into which batch norms were folded.
    """
    from remtta.formats.adaptive.centering import STATUS
    from remtta.formats.adaptive.writing import write_adaptive

    metadata, model = {**adapted.facts, ADAPTIVE: json.dumps(STATUS)}, adapted.model
    if isinstance(model, OnnxClassifier):
        clean = None
        if source_data is not None:
            _log.info("measuring the convolutions of %s on the images of %s ...", adapted.info.name, source_data)
            clean = _training_crops(source_data, adapted.info.preprocessing)
        write_adaptive(model, path, metadata, clean=clean)
        return
    if source_data is not None:
        raise UsageError(f"{adapted.info.name} is a model in torch, which has its batch norms; leave --source-data out")
    backbone = backbone_of(model)
    with TemporaryDirectory() as folder:
        save_onnx(adapted, file := Path(folder) / _ONNX_FILE)
        exported = OnnxClassifier(read_graph(file), None, [_PROVIDER], None)
        exported.patch_size = backbone.patch_size
        write_adaptive(exported, path, metadata, original=model)


def _training_crops(folder: Path, preprocessing: Preprocessing) -> Iterator[Tensor]:
    """Return batches of random crops of images, as of training, whose statistics batch norms have."""
    height, width = preprocessing.input_size
    resampling = Image.Resampling[preprocessing.interpolation.upper()]

    def crop(image: Image.Image) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(image.tobytes()))  # threads take images in any order
        top, left, high, wide = random_box(image.height, image.width, generator)
        resized = image.resize((width, height), resampling, (left, top, left + wide, top + high))
        return flipped(torch.from_numpy(np.array(resized)).permute(2, 0, 1), generator)

    files, device = source_files(folder), torch.device("cpu")
    if len(files) < _FEW_SOURCE_IMAGES:
        _log.warning("--source-data: %d images are too few for batch norms; give hundreds, of all classes", len(files))
    return clean_batches(files, preprocessing, device, _MOST_SOURCE_IMAGES, lambda: None, transform=crop)


def _to_onnx(adapted: ExportableModel) -> Any:
    from onnxscript.optimizer import fold_constants, remove_unused_nodes

    # Other attention kernels cannot be exported if they have a bias.
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(SDPBackend.MATH):
        try:
            # Not optimised, so that batch norms and the names of tensors stay; runtimes optimise when they load.
            program = torch.onnx.export(
                adapted.model,
                (adapted.images(2),),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                optimize=False,
                verbose=False,
            )
        except Exception as error:  # anything, e.g. from code not made for tracing
            cause = error.__cause__ or error  # torch's message only says how to report it
            reason = f"{type(cause).__name__}: {first_line(cause)[:200]}"
            raise RemttaError(
                f"torch cannot export {adapted.delta.model} to ONNX: {reason}; use --format timm"
            ) from error
    assert program is not None
    fold_constants(program.model)  # by which the exporter computes biases and bounds: runtimes would not
    remove_unused_nodes(program.model)
    proto = program.model_proto
    del proto.graph.value_info[:]  # intermediate shapes, which onnxruntime's quantiser cannot handle
    return proto


def write_peft(adapted: ExportableModel, folder: Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors`, for `PeftModel.from_pretrained(base, folder)`. Raise
    UsageError if PEFT is missing, or the delta changes something that LayerNorm tuning cannot represent; RemttaError if
    PEFT's logits differ from the adapted model's.
    """
    peft = needed("peft", "export", "an export")
    layers = sorted({name.rpartition(".")[0] for name in adapted.delta.tensors})
    tunable = {
        name
        for name, module in norm_modules(adapted.model).items()
        if not isinstance(module, nn.modules.batchnorm._BatchNorm)
    }
    heads = tuple(f"{name}." for name in classifiers_of(adapted.model))  # of centered logits; stored as whole layers
    if others := [name for name in layers if name not in tunable and not f"{name}.".startswith(heads)]:
        raise UsageError(
            f"the delta changes {others[0] or 'weights'} ({len(others)} layers in all), and LayerNorm tuning keeps "
            "neither running statistics nor other weights than the norms' and the head's; use --format timm or onnx"
        )
    base = copy.deepcopy(adapted.model)
    base.load_state_dict(dict(adapted.base))
    config = peft.LNTuningConfig(target_modules=f"({'|'.join(map(re.escape, layers))})", inference_mode=True)
    tuned = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if name in adapted.delta.tensors:
                layer, _, part = name.rpartition(".")
                tuned.get_submodule(f"base_model.model.{layer}.ln_tuning_layers.default").get_parameter(part).copy_(
                    parameter
                )
    tuned.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a template to fill in
    adapted.check("PEFT", peft.PeftModel.from_pretrained(base, str(folder)).eval())


def write_timm(adapted: ExportableModel, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, and verify them by loading them with timm and remtta. Raise
    UsageError if timm cannot build such a model; RemttaError if the loaded model is not the adapted model.
    """
    import timm
    from timm.models._hub import save_config_for_hf  # its public save_for_hf refuses weights that layers share

    model: Any = adapted.model
    config = config_of(model)
    if "architecture" not in config or custom_head(model):
        raise UsageError(
            "--format timm takes neither zero-shot models nor folders saved by transformers; use --format onnx, or "
            "remtta apply"
        )
    model.pretrained_cfg = {name: value for name, value in config.items() if name not in ("built_from", "label_names")}
    try:
        labels = {"label_names": list(adapted.info.labels)} if adapted.info.labels else {}
        facts = {name: value for name, value in adapted.facts.items() if name not in ("labels", "preprocessing")}
        save_config_for_hf(model, str(folder / "config.json"), model_config={**labels, "remtta": facts})
        save_weights(folder / "model.safetensors", model)
    finally:
        model.pretrained_cfg = config
    name = f"local-dir:{folder}"
    try:
        reloaded = timm.create_model(name, pretrained=True).eval()
        info = model_info(load_model(name))
    except Exception as error:  # timm raises many types
        raise RemttaError(
            f"timm cannot load its own export of {adapted.delta.model}: {error}; try --format onnx"
        ) from error
    expected = adapted.info
    if (info.sha256, info.preprocessing, info.labels) != (expected.sha256, expected.preprocessing, expected.labels):
        raise RemttaError(f"timm loads its own export of {adapted.delta.model} as a different model; use --format onnx")
    adapted.check("timm", reloaded)


_WRITERS: dict[Format, tuple[Callable[[ExportableModel, Path], None], Sequence[str], str]] = {
    "onnx": (
        lambda adapted, folder: save_onnx(adapted, folder / _ONNX_FILE),
        ("onnx", "onnxruntime", "onnxscript"),
        _ONNX_FILE,
    ),
    "peft": (write_peft, ("peft",), "adapter_config.json"),
    "timm": (write_timm, (), "config.json"),
}
"""A function for each format, the packages that it needs, and the name of its main file."""


def check_packages(format: Format, *, of_onnx: bool = False) -> None:
    """Raise UsageError if a package is missing that a format, or an export of an ONNX file, needs."""
    for package in _WRITERS[format][1]:
        if not (of_onnx and package == "onnxscript"):
            check_installed(package, "onnx" if of_onnx else "export", "an export")


def export_model(adapted: ExportableModel, format: Format, output: Path, *, overwrite: bool = False) -> list[Path]:
    """Write the adapted model to a folder in a format, and verify it there; return the files. Raise UsageError if a
    package is missing, files exist already or are those of the model or the delta, another process writes to the
    folder, or the format cannot hold the model; OutputError if a file cannot be written; RemttaError if the export
    fails, or its logits differ from the model's.
    """
    write, _, main_file = _WRITERS[format]
    check_packages(format, of_onnx=isinstance(adapted.model, OnnxClassifier))
    if isinstance(adapted.model, OnnxClassifier) and format != "onnx":
        raise UsageError(f"{adapted.delta.model} is an ONNX file; use --format onnx")
    check_can_hold(output, "the folder of an export", "--output")
    if not overwrite and (output / main_file).exists():  # checked before the work, other files after it
        raise UsageError(f"{output / main_file} exists; choose another --output or add --overwrite")
    with writing(output), _hidden_folder(output) as folder:
        try:
            write(adapted, folder)
        except SafetensorError as error:  # what safetensors raises on a full disk
            raise OutputError(f"{output} cannot be written: {error}") from error
        files = sorted(folder.iterdir())
        for path in files:  # safetensors makes files that only their owner can read
            shutil.copymode(folder / main_file, path)
        existing = [output / path.name for path in files if (output / path.name).exists()]
        if existing and not overwrite:
            raise UsageError(f"{existing[0]} exists; choose another --output or add --overwrite")
        for path in existing:
            check_not_input(path, "--output", adapted.inputs)
        for path in existing:  # all first, so that a kill leaves no mix of new and old files
            path.unlink()
        for path in files:
            os.replace(path, output / path.name)
    return [output / path.name for path in files]


@contextlib.contextmanager
def _hidden_folder(output: Path) -> Iterator[Path]:
    """Create an empty hidden folder to write to, replacing one that a killed export left."""
    lock, folder = FolderLock(output), output / ".export"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()
