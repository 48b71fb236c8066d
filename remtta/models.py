"""Load a classifier, its labels and its preprocessing, all through timm."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_model_data_config
from torch import Tensor, nn

from remtta.checkpoints import load_checkpoint
from remtta.errors import ModelError, UsageError
from remtta.hub import reachable_or_offline
from remtta.layers import unwrap

EMBEDDED = "remtta-demo"
UNKNOWN = "unknown"  # name of a model that `load_model` did not build
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input: resize the short side, centre crop, normalise.

    Attributes:
        input_size: Height and width, in pixels.
        mean: Per channel, for pixel values in [0, 1].
        std: Per channel, for pixel values in [0, 1].
        interpolation: Name of the resize filter, as timm spells it.
        crop_pct: Share of the resized image's short side that the crop keeps.
        crop_mode: "center", "squash" or "border", as in timm.
    """

    input_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    crop_pct: float
    crop_mode: str

    def transform(self) -> Callable[[Image.Image], Tensor]:
        """timm's evaluation transform from a PIL image to a uint8 tensor (3, H, W)."""
        transform: Callable[[Image.Image], Tensor] = create_transform(
            input_size=(3, *self.input_size),
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            normalize=False,
        )
        return transform

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 (B, 3, H, W) to the float32 the model expects, on the same device."""
        mean = torch.tensor(self.mean, device=images.device).view(1, -1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(1, -1, 1, 1)
        return (images.float() / 255 - mean) / std

    def as_dict(self) -> dict[str, Any]:
        """The values, ready for JSON."""
        return asdict(self)


def load_model(
    name: str,
    *,
    checkpoint: str | Path | None = None,
    use_ema: bool = False,
    num_classes: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    input_size: tuple[int, int] | None = None,
    interpolation: str | None = None,
    crop_pct: float | None = None,
    labels: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
) -> nn.Module:
    """Build a timm classifier with its weights, in eval mode and fp32.

    Preprocessing, labels and what it was built from travel with the model, in
    timm's own `pretrained_cfg`; whatever is given here replaces the
    checkpoint's values.

    Args:
        name: timm model name, "hf-hub:...", "local-dir:...", or "remtta-demo"
            for the small embedded classifier of road signs.
        checkpoint: Weights file; without one, timm's pretrained weights are
            used, downloaded at the first time.
        use_ema: Take the averaged weights of a timm training checkpoint.
        num_classes: Classes of the checkpoint's head.
        model_kwargs: More arguments for the model, as in timm.
        mean: Three values, for pixels in [0, 1].
        std: Three values, for pixels in [0, 1].
        input_size: Height and width, in pixels.
        interpolation: One of INTERPOLATIONS.
        crop_pct: Share of the short side that the centre crop keeps, in (0, 1].
        labels: One name per class.
        device: Where the model goes.

    Returns:
        The timm model.

    Raises:
        ModelError: If the weights cannot be downloaded, or the model cannot
            be built or is no classifier of RGB images.
        CheckpointError: If the checkpoint is unreadable, unsafe or does not fit.
        UsageError: If the name is unknown or a value cannot be used.
    """
    if name == EMBEDDED:
        if use_ema or num_classes or model_kwargs or input_size:
            raise UsageError(f"{EMBEDDED} is one fixed model: it takes no other classes, size or arguments")
        from remtta.demo.model import load_demo_model

        own: dict[str, Any] = {
            "mean": mean,
            "std": std,
            "interpolation": interpolation,
            "crop_pct": crop_pct,
            "labels": labels,
        }
        embedded = load_demo_model(checkpoint=checkpoint, device=device, **own)
        _config_of(embedded)["built_from"] = _built_from(EMBEDDED, checkpoint)
        return embedded
    place = select_device(device)
    _check_preprocessing(mean, std, interpolation, crop_pct)
    if use_ema and checkpoint is None:
        raise UsageError("--use-ema chooses among the weights of a --checkpoint, and none was given")
    kwargs = dict(model_kwargs or {})
    if num_classes is not None:
        kwargs["num_classes"] = num_classes
    if input_size is not None:
        kwargs["img_size"] = tuple(input_size)
    model: Any = _create(name, pretrained=checkpoint is None, kwargs=kwargs)
    _check_classifier(model, name, num_classes, pretrained=checkpoint is None)
    if checkpoint is not None:
        load_checkpoint(model, Path(checkpoint), use_ema=use_ema)
    given = {
        "mean": None if mean is None else tuple(mean),
        "std": None if std is None else tuple(std),
        "interpolation": interpolation,
        "crop_pct": crop_pct,
    }
    config = {**model.pretrained_cfg, **{key: value for key, value in given.items() if value is not None}}
    config["input_size"] = (3, *_image_size(model, config))
    config["label_names"] = _known_labels(model, config) if labels is None else _checked_labels(labels, model)
    config["built_from"] = _built_from(name, checkpoint, use_ema, num_classes, model_kwargs, input_size)
    model.pretrained_cfg = model.default_cfg = config
    loaded: nn.Module = model.float().eval().to(place)
    return loaded


def check_adaptable(name: str, model_kwargs: Mapping[str, Any] | None = None) -> None:
    """Refuse a timm architecture that no method adapts, before its weights are downloaded or read.

    Args:
        name: As for `load_model`; folders, hub repositories and unknown names are left to it.
        model_kwargs: More arguments for the model, as in timm.

    Raises:
        ModelError: Saying what the methods need.
    """
    architecture = name.partition(".")[0]
    if architecture not in timm.list_models():
        return
    try:
        with torch.device("meta"):  # which takes no memory
            model = timm.create_model(architecture, pretrained=False, **(model_kwargs or {}))
    except Exception as error:  # `load_model` meets it again, and tells it
        _log.debug("%s cannot be checked beforehand: %s", name, error)
        return
    try:
        unwrap(model)
    except ModelError as error:
        raise ModelError(f"{name} cannot be adapted: {error}") from error


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """The preprocessing a timm model asks for: its own input size, the rest from its `pretrained_cfg`."""
    config = resolve_model_data_config(model)
    height, width = _image_size(model, config)
    return Preprocessing(
        input_size=(height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        crop_pct=float(config["crop_pct"]),
        crop_mode=config["crop_mode"],
    )


def labels_of(model: nn.Module) -> list[str] | None:
    """The class names of a timm model: its own, ImageNet's for 1,000 classes, or None."""
    return _known_labels(model, _config_of(model))


def origin_of(model: nn.Module) -> dict[str, Any]:
    """What `load_model` built a model from, for records and deltas; the name "unknown" for any other model."""
    return dict(_config_of(model).get("built_from") or {"name": UNKNOWN})


def set_labels(model: Any, labels: Sequence[str]) -> None:
    """Name the classes of a timm model.

    Raises:
        UsageError: If there are more or fewer names than classes.
    """
    model.pretrained_cfg = {**model.pretrained_cfg, "label_names": _checked_labels(labels, model)}


def state_sha256(model: nn.Module) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of a model's whole state."""
    return tensors_sha256(model.state_dict())


def tensors_sha256(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the sorted name, dtype, shape and bytes of tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def restrict_classes(model: Any, numbers: Sequence[int]) -> None:
    """Cut a classifier's heads down to some of its classes, in place.

    Losses and thresholds of every method then see only these classes, as the
    protocols of ImageNet-R and ImageNet-A ask for.

    Args:
        model: A timm VisionTransformer.
        numbers: The classes to keep, in their new order.

    Raises:
        ModelError: If a head is not a linear layer.
    """
    rows = torch.tensor(list(numbers))
    labels = labels_of(model)
    for name in ("head", "head_dist"):
        head = getattr(model, name, None)
        if head is None:
            continue
        if not isinstance(head, nn.Linear):
            raise ModelError(f"the model's {name} is no linear layer, so its classes cannot be restricted")
        kept = nn.Linear(head.in_features, len(rows), bias=head.bias is not None, device=head.weight.device)
        with torch.no_grad():
            kept.weight.copy_(head.weight[rows])
            if head.bias is not None:
                kept.bias.copy_(head.bias[rows])
        setattr(model, name, kept)
    model.num_classes = len(rows)
    names = None if labels is None else [labels[number] for number in numbers]
    model.pretrained_cfg = {**model.pretrained_cfg, "num_classes": len(rows), "label_names": names}


@contextlib.contextmanager
def restricted_classes(model: Any, numbers: Sequence[int] | None) -> Iterator[None]:
    """Have `restrict_classes` done within the block, if there are numbers; afterwards the heads are the same as before.

    Raises:
        ModelError: If a head is not a linear layer.
    """
    names = ("head", "head_dist", "num_classes", "pretrained_cfg")
    whole = {name: getattr(model, name) for name in names if hasattr(model, name)}
    try:
        if numbers is not None:
            restrict_classes(model, numbers)
        yield
    finally:
        for name, value in whole.items():
            setattr(model, name, value)


def select_device(device: str | torch.device) -> torch.device:
    """A torch device by name; "auto" takes CUDA, then MPS, then the CPU.

    Raises:
        UsageError: If there is no such device here.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f'unknown device "{device}"; choose auto, cpu, cuda or mps') from error
    usable = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not usable.get(chosen.type, False):
        raise UsageError(f'device "{device}" is not available on this machine; use --device cpu')
    return chosen


def _config_of(model: Any) -> dict[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def _built_from(
    name: str,
    checkpoint: str | Path | None,
    use_ema: bool = False,
    num_classes: int | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    input_size: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Arguments of `load_model` that build the same model from anywhere: the checkpoint's path is absolute."""
    return {
        "name": name,
        "checkpoint": None if checkpoint is None else str(Path(checkpoint).resolve()),
        "use_ema": use_ema,
        "num_classes": num_classes,
        "model_kwargs": dict(model_kwargs or {}),
        "input_size": input_size,
    }


def _create(name: str, *, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    source = name.partition(":")[0] if ":" in name else ""
    if not source and name.split(".")[0] not in timm.list_models():
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        hint = f"did you mean {', '.join(close)}?" if close else "timm.list_models() names them all"
        if "/" in name:
            hint = f"a folder is local-dir:{name}, a hub repository hf-hub:{name}, a file goes to --checkpoint"
        raise UsageError(f'unknown model "{name}"; {hint}')
    if source == "local-dir" and not Path(name.partition(":")[2], "config.json").is_file():
        raise UsageError(f"{name}: no such folder with a config.json")
    if not source and "." in name and name not in timm.list_pretrained():
        architecture = name.partition(".")[0]
        known = sorted({*timm.list_pretrained(f"{architecture}.*")}) or [architecture]
        raise UsageError(f'unknown weights "{name}"; choose {", ".join(known)}')
    if pretrained and source != "local-dir":
        _log.info("loading the pretrained weights of %s (downloaded at the first time)", name)
    try:
        with reachable_or_offline() if (pretrained or source) and source != "local-dir" else contextlib.nullcontext():
            model: nn.Module = timm.create_model(name, pretrained=pretrained, **kwargs)
    except TypeError as error:
        raise UsageError(f"{name} does not take these model arguments: {error}") from error
    except Exception as error:  # timm and its download libraries share no base class
        raise ModelError(_creation_failure(name, pretrained, error)) from error
    return model


def _creation_failure(name: str, pretrained: bool, error: Exception) -> str:
    lines = (str(error).strip() or type(error).__name__).splitlines()
    reason = " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
    offline = isinstance(error, OSError) or ("Error" in type(error).__name__ and "hub" in type(error).__module__)
    if pretrained and offline and not name.startswith("local-dir:"):
        return (
            f"the pretrained weights of {name} could not be downloaded; check the network, "
            f"or give a weights file with --checkpoint ({type(error).__name__})"
        )
    return f"{name} could not be built: {reason}"


def _check_classifier(model: Any, name: str, num_classes: int | None, *, pretrained: bool) -> None:
    config = _config_of(model)
    if not model.num_classes:
        raise ModelError(f"{name} has no classifier head; choose a classifier, or give --checkpoint and --num-classes")
    if getattr(model, "in_chans", 3) != 3:
        raise ModelError(f"{name} takes {model.in_chans} channels; remtta feeds RGB images")
    trained_for = config.get("num_classes")
    if pretrained and trained_for and num_classes is not None and num_classes != trained_for:
        raise UsageError(
            f"{name} comes with a head for {trained_for} classes; with --num-classes {num_classes} its head "
            "would be untrained, so give your fine-tuned weights with --checkpoint"
        )


def _check_preprocessing(
    mean: Sequence[float] | None, std: Sequence[float] | None, interpolation: str | None, crop_pct: float | None
) -> None:
    for title, values in (("mean", mean), ("std", std)):
        if values is not None and (len(values) != 3 or not all(math.isfinite(v) for v in values)):
            raise UsageError(f"{title} needs three finite numbers (R G B), got {list(values)}")
        if values is not None and max(values) > 1:
            raise UsageError(f"{title} is for pixels in [0, 1], got {list(values)}; divide it by 255")
    if std is not None and min(std) <= 0:
        raise UsageError(f"std must be positive, got {list(std)}")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise UsageError(f'unknown interpolation "{interpolation}"; choose {", ".join(INTERPOLATIONS)}')
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UsageError(f"crop-pct must be in (0, 1], got {crop_pct:g}")


def _image_size(model: nn.Module, config: Mapping[str, Any]) -> tuple[int, int]:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    return int(size[0]), int(size[1])


def _checked_labels(labels: Sequence[str], model: Any) -> list[str]:
    if len(labels) != model.num_classes:
        raise UsageError(f"the label file names {len(labels)} classes, but the model has {model.num_classes}")
    return list(labels)


def _known_labels(model: Any, config: Mapping[str, Any]) -> list[str] | None:
    own = _own_labels(config)
    if own and len(own) == model.num_classes:
        return own
    subset = infer_imagenet_subset(model)
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    return [info.index_to_description(index) for index in range(model.num_classes)]


def _own_labels(config: Mapping[str, Any]) -> list[str]:
    names = config.get("label_names") or ()
    if isinstance(names, Mapping):  # timm also takes class number -> name, whose numbers JSON makes text
        by_number = {str(number): name for number, name in names.items()}
        names = [by_number[str(number)] for number in range(len(by_number)) if str(number) in by_number]
    return [str(name) for name in names]
