"""Read weights from common file formats, without ever running code from them."""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import math
import pickle
import re
import traceback
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from remtta.errors import CheckpointError, UsageError, first_line, listed
from remtta.extensions import load_of_part
from remtta.models.conversion import COUNTER, TORCHVISION, TRANSFORMERS, convert, outer_heads, split_prefix
from remtta.models.metadata import PretrainedConfig
from remtta.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD, check_preprocessing
from remtta.models.tensor_files import UNREADABLE, read_tensors
from remtta.models.unwrapping import classifiers_of

_log = logging.getLogger(__name__)

_NESTED = ("state_dict", "model", "model_state_dict", "net", "weights", "params", "teacher", "ema")
_NESTED_EMA = ("state_dict_ema", "model_ema", "ema")
_TORCH_STARTS = (b"PK", b"\x80")  # a zip archive, or the bare pickle of older versions
_PREPROCESSING = ("mean", "std", "interpolation", "crop_pct")
_MAX_MEMBERS = 2**16  # of a zip archive: more than tensors of any model
_SCALE = re.compile(r"(?<!layer)(?<!logit)(^|[._])scales?($|[._])|scaled_fp8")  # of 8-bit weights
_SHOWN = 3  # names listed in an error before "and N more"


class PickledObject:
    """Stands in for an object of NumPy or pathlib saved beside the weights, such as the best accuracy, and stays empty:
    no code of these libraries runs.
    """

    def __init__(self, *args: object) -> None:
        """Ignore the arguments."""

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


_ARRAYS = ("multiarray.scalar", "multiarray._reconstruct", "numeric._frombuffer")
_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_IGNORED = (
    *(
        f"numpy.{name}"
        for name in ("dtype", "ndarray", *(f"{c}.{name}" for c in ("core", "_core") for name in _ARRAYS))
    ),
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
)


def load_checkpoint(model: nn.Module, path: Path, *, use_ema: bool = False) -> PretrainedConfig:
    """Load every weight of a timm model from a file, all or nothing; return the preprocessing that it implies.

    The file is .safetensors, .npz (Google's ViT releases), or a PyTorch file read in weights-only mode: a bare state
    dict, or one under "state_dict" or "model", with or without wrapper prefixes. Weights may have timm's names, those
    that timm's own `checkpoint_filter_fn` converts (DINOv2, BEiT, ConvNeXt, Swin), torchvision's (ResNet, ViT, Swin,
    ConvNeXt), or others that a function `model.rename_weights` gives timm's names. They are converted to the model's
    dtype. The preprocessing, from torchvision's names or the options of timm's training script in the file, is in the
    terms of timm's `pretrained_cfg`. Raise CheckpointError if the file cannot be read, holds anything but weights, or
    does not fit the model.
    """
    if path.suffix.lower() == ".npz":
        _load_npz(model, path, use_ema)
        return {}
    state, preprocessing = _read_with_timm_names(path, model, use_ema)
    if preprocessing:
        _log.info("%s implies this preprocessing, where no other is given: %s", path, preprocessing)
    check_fits(state, model, path)
    model.load_state_dict(state, strict=False)  # only counters may be missing
    return preprocessing


def _read_with_timm_names(path: Path, model: nn.Module, use_ema: bool) -> tuple[dict[str, Tensor], PretrainedConfig]:
    """Return the weights in a file under timm's names, and the preprocessing that it implies."""
    content = _content(path)
    saved, trained = _select(content, path, use_ema), _training_preprocessing(content)
    inside, outside = split_prefix(saved, model)
    rename = getattr(model, "rename_weights", dict)
    if any(map(TRANSFORMERS.match, inside)) and rename is dict:
        raise CheckpointError(
            f"{path} has the names of transformers, whose config.json is needed too; give the folder that has both, "
            "as --model local-dir:FOLDER"
        )
    if is_torchvisions := any(map(TORCHVISION.match, inside)):
        rename = load_of_part("remtta.formats.torchvision_names:to_timm_names", f"{path} has torchvision's names and")
    try:
        named = rename(inside)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} holds inconsistent weights: {first_line(error)}") from error
    check_values(named, model, path)
    state = convert(named, model)
    if reshaped := [name for name in named if name in state and state[name].shape != named[name].shape]:
        _log.info("%s: converted by timm to the model's shape: %s", path, listed(reshaped, _SHOWN))
    heads = outer_heads(state, outside, model)
    state |= {name: outside[own] for own, name in heads.items()}
    check_values({name: tensor for name, tensor in state.items() if name not in named}, model, path)
    kept = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    left = [name for name in named if name not in state and named[name].untyped_storage().data_ptr() not in kept]
    _log_left_out(path, [*(name for name in outside if name not in heads), *left])
    return state, {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, **trained} if is_torchvisions else trained


def _training_preprocessing(content: object) -> PretrainedConfig:
    """Return the preprocessing options of timm's training script, which saves those it was given with the weights."""
    args = content.get("args") if isinstance(content, Mapping) else None
    try:
        found = {name: value for name in _PREPROCESSING if (value := getattr(args, name, None))}
        found |= {name: (*found[name],) * (3 // len(found[name])) for name in ("mean", "std") if name in found}
        check_preprocessing(*map(found.get, _PREPROCESSING))
    except (UsageError, TypeError, ValueError, RuntimeError) as error:  # another script's options of these names
        _log.debug("the options saved with the weights are not timm's: %s", error)
        return {}
    return found


def check_values(state: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Raise CheckpointError, naming the first tensor that is not dense, floating-point and finite."""
    weights = model.state_dict()
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise CheckpointError(f"{path} holds {name} as a sparse, quantised or empty tensor; save plain weights")
        if name in weights and weights[name].is_floating_point() and not tensor.is_floating_point():
            raise CheckpointError(f"{path} holds {name} as {tensor.dtype}; remtta takes weights in floating point")
        try:
            values = tensor.float() if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
        except NotImplementedError as error:  # of packed dtypes
            raise CheckpointError(f"{path} holds {name} as {tensor.dtype}; save it in 16 or 32 bits") from error
        if values.is_floating_point() and not torch.isfinite(values).all():
            raise CheckpointError(f"{path} holds values in {name} that are not finite numbers; it is damaged")


def checkpoint_dtypes(model: nn.Module, path: Path, *, use_ema: bool = False) -> dict[str, torch.dtype]:
    """Return the dtype of each weight in a checkpoint that fits `model`, under the model's own names."""
    if path.suffix.lower() == ".npz":
        return {}
    state, _ = _read_with_timm_names(path, model, use_ema)
    return {name: tensor.dtype for name, tensor in state.items()}


def read_weights(path: Path, use_ema: bool) -> Mapping[str, Tensor]:
    """Read the named weights in a file, unchanged; raise CheckpointError if that fails, or it holds anything else."""
    return _select(_content(path), path, use_ema)


def _content(path: Path) -> object:
    if path.suffix.lower() == ".safetensors":
        try:
            return read_tensors(path)[1]
        except UNREADABLE as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
    try:
        with open(path, "rb") as file:
            start = file.read(16)
        if start[8:9] == b"{":
            raise ValueError("it is a safetensors file; rename it to end in .safetensors")
        if not start.startswith(_TORCH_STARTS):
            raise ValueError(f"it starts with {start!r}" if start else "it is empty")
        if start.startswith(b"PK"):
            _check_archive(path)
        # timm's training checkpoints store their command line as an argparse.Namespace, which is harmless.
        ignored = [(PickledObject, name) for name in _IGNORED]
        with torch.serialization.safe_globals([argparse.Namespace, *ignored]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{path} holds more than weights ({name[1] if name else 'pickled objects'}) and could run code, so it was "
            "not loaded; "
            "save it again with torch.save(model.state_dict(), ...) or as safetensors"
        ) from error
    except Exception as error:  # zipfile, struct, pickle and torch share no base class
        reason = first_line(error)  # of TorchScript, torch would suggest to run the file's code
        reason = "it is a TorchScript program; save its state_dict()" if "TorchScript" in reason else reason
        raise CheckpointError(f"{path} is not a readable PyTorch checkpoint: {reason}") from error


def _select(content: object, path: Path, use_ema: bool) -> Mapping[str, Tensor]:
    """Return the state dict inside what a training script saved."""
    nested = (
        {name: value for name, value in content.items() if _is_state(value)} if isinstance(content, Mapping) else {}
    )
    names = [name for name in (_NESTED_EMA if use_ema else _NESTED) if name in nested]
    if use_ema and not names:
        raise CheckpointError(f"{path} holds no averaged weights (state_dict_ema); drop --use-ema")
    if not names and len(nested) == 1 and not _is_state(content):
        names = [*nested]
    if names:
        return _select(nested[names[0]], path, use_ema=False)
    if not isinstance(content, Mapping) or not content:
        raise CheckpointError(f"{path} holds {type(content).__name__} instead of named weights")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            text = f"{path} holds {type(value).__name__} at {name!r} instead of named weights"
            raise CheckpointError(f"{text}; save the model's state_dict() alone")
    _check_size(path, sum(value.numel() * value.element_size() for value in content.values()))
    in_8_bits = any(value.is_floating_point() and value.element_size() == 1 for value in content.values())
    if in_8_bits and (scales := [name for name in content if _SCALE.search(name)]):
        raise CheckpointError(
            f"{path} holds 8-bit weights with scales ({listed(scales, _SHOWN)}), which remtta does not apply; multiply "
            "them, and save the weights in 16 or 32 bits"
        )
    return content


def _is_state(value: object) -> bool:
    return isinstance(value, Mapping) and any(isinstance(weight, Tensor) for weight in value.values())


def most_bytes(file_bytes: int) -> int:
    """Return the most memory that weights may take, given the size of their file."""
    return max(2**30, 16 * file_bytes)


def _check_size(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError for a compressed file, or one of tensors that repeat few values, that would fill memory."""
    file_bytes = path.stat().st_size
    if num_bytes > most_bytes(file_bytes):
        sizes = f"{num_bytes / 2**20:,.0f} MiB, but the file has only {file_bytes / 2**20:,.1f} MiB"
        raise CheckpointError(f"{path} was not loaded: its weights would take {sizes}; it is damaged")


def _check_archive(path: Path) -> None:
    """Raise CheckpointError for a zip archive that would fill memory."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise CheckpointError(f"{path} was not loaded: it holds {len(members):,} tensors; it is damaged")
    _check_size(path, sum(member.file_size for member in members))


def without_wrappers(state: Mapping[str, Tensor], model: nn.Module, path: Path) -> dict[str, Tensor]:
    """Return a state without what DataParallel, torch.compile, averaging and Lightning put before every name.

    Of several such prefixes, it is the one under which most of the model's weights are; tensors without it are left
    out, and named in the log.
    """
    inside, outside = split_prefix(state, model)
    _log_left_out(path, [*outside])
    return inside


def _log_left_out(path: Path, names: Sequence[str]) -> None:
    if names:
        _log.info("%s: left out, as the model has no such weights: %s", path, listed(names, _SHOWN))


def check_fits(state: Mapping[str, Tensor], model: nn.Module, path: Path) -> None:
    """Raise CheckpointError, with one line on missing, unknown and misshapen weights, if there are any."""
    weights = model.state_dict()
    wrong = {
        name: f"{name} is {_shape(state[name])} in the file and {_shape(tensor)} in the model"
        for name, tensor in weights.items()
        if name in state and state[name].shape != tensor.shape
    }
    head_paths = ("head", *classifiers_of(model))
    heads = [name for name in wrong if name.startswith(head_paths) and state[name].shape[:1] != weights[name].shape[:1]]
    problems = []
    if heads:
        classes = next((state[name].shape[0] for name in heads if state[name].ndim), "no")
        texts = [wrong[name] for name in heads]
        problems.append(f"{listed(texts, _SHOWN)} (the file has {classes} classes: see --num-classes)")
    if others := [text for name, text in wrong.items() if name not in heads]:
        problems.append(listed(others, _SHOWN))
    for title, names in (
        ("missing in the file", [name for name in weights if name not in state and not name.endswith(COUNTER)]),
        ("unknown to the model", [name for name in state if name not in weights]),
    ):
        if names:
            problems.append(f"{title}: {listed(names, _SHOWN)}")
    if [*wrong] == ["pos_embed"] and len(problems) == 1 and (size := _oblong_size(state["pos_embed"], model)):
        problems.append(
            "its patches form no square: give the size it was trained at, such as --input-size {} {}".format(*size)
        )
    num_fitting = sum(name in state and name not in wrong for name in weights)
    if num_fitting < len(weights) / 2:
        share = f"only {num_fitting} of the model's {len(weights)} tensors are in it, by name and shape"
        problems.insert(
            0, f"{share}, so it is of another architecture or size (see --model), has other names, or is incomplete"
        )
    if problems:
        if "fc_norm.weight" in state and "fc_norm.weight" not in weights:
            problems.append("its fc_norm comes after average pooling: add --model-kwargs global_pool=avg")
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(problems)}")


def _oblong_size(pos_embed: Tensor, model: nn.Module) -> tuple[int, int] | None:
    """Return the image size, nearest to a square, for position embeddings that form no square; None if they do."""
    prefix = 0 if getattr(model, "no_embed_class", False) else int(getattr(model, "num_prefix_tokens", 1))
    patches = pos_embed.shape[1] - prefix if pos_embed.ndim == 3 else 0
    rows = next((rows for rows in range(math.isqrt(max(0, patches)), 1, -1) if patches % rows == 0), 0)
    if not rows or rows * rows == patches:
        return None
    height, width = model.patch_embed.patch_size  # type: ignore[union-attr,misc]
    return rows * height, patches // rows * width


def _shape(tensor: Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape) or "a scalar"


def _load_npz(model: nn.Module, path: Path, use_ema: bool) -> None:
    """Load Google's releases through timm's own reader, which loads no pickles."""
    if use_ema:
        raise CheckpointError(f"{path} is an .npz file and holds no averaged weights; drop --use-ema")
    if not isinstance(model, VisionTransformer):
        raise CheckpointError(f"{path}: .npz checkpoints are for VisionTransformer models")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a readable .npz file")
    with contextlib.suppress(zipfile.BadZipFile):  # damage is reported below
        _check_archive(path)
    filled = copy.deepcopy(model)  # timm's reader stops halfway if a file does not fit
    unset = {name: torch.full_like(value, torch.nan) for name, value in model.named_parameters()}
    filled.load_state_dict(unset, strict=False)
    try:
        filled.load_pretrained(str(path))
    except Exception as error:  # zipfile, zlib, numpy and timm share no base class
        traceback.clear_frames(error.__traceback__)  # their frames keep the file open
        raise CheckpointError(f"{path} does not fit the model or is damaged: {first_line(error)}") from error
    # timm's reader silently skips a head of another size: values left unset did not fit.
    if left := [name for name, value in filled.named_parameters() if value.isnan().any()]:
        raise CheckpointError(
            f"{path} does not fit the model: nothing usable for {listed(left, _SHOWN)} (see --num-classes and --model)"
        )
    model.load_state_dict(filled.state_dict())
