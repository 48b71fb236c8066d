"""The preprocessing of images for a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from remtta.errors import FrameError, UsageError
from remtta.models.metadata import PretrainedConfig
from remtta.models.unwrapping import config_of, unwrap_model
from remtta.options.option import plain_number

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGENET_CROP_PCT = 0.875
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border", "center_floor", "squash_floor")

_PIXEL_BYTES = 4  # in Pillow, which resizes first the rows, then the columns
MAX_RESIZED_BYTES = 256 * 2**20
"""Longer strips are refused: resized to the model's height, a line of pixels has millions of columns."""


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of an image: resize the short side, centre crop, normalise.

    Attributes:
        input_size: Height and width, in pixels.
        mean: Mean per channel, for pixel values in [0, 1].
        std: Standard deviation per channel, likewise.
        interpolation: Resize filter in timm's terms, such as "bicubic".
        crop_pct: Share of the resized image's short side that the crop keeps.
        crop_mode: "center", "squash" or "border", as in timm; with "_floor", half pixels are cut, as in transformers.

    Raises:
        UsageError: If a value is out of range.
    """

    input_size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        for name in ("input_size", "mean", "std"):
            object.__setattr__(self, name, as_tuple(getattr(self, name)))
        check_preprocessing(self.mean, self.std, self.interpolation, self.crop_pct, self.input_size)
        if self.crop_mode not in CROP_MODES:
            raise UsageError(f'unknown crop_mode "{self.crop_mode}"; choose {", ".join(CROP_MODES)}')

    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Return a function from an RGB image to a uint8 tensor (3, H, W), equal to timm's evaluation transform; it
        raises FrameError for a strip that would take over 256 MiB.

        timm's own would import torchvision, which takes seconds and 160 MB.
        """
        return self._transformed

    def _transformed(self, image: Image.Image) -> Tensor:
        height, width = self.input_size
        if (needed := self.resized_bytes(*image.size)) > MAX_RESIZED_BYTES:
            size = f"{image.width}x{image.height}"
            raise FrameError(f"{size} pixels take {needed / 2**20:.0f} MiB to resize; cut the strip into pieces")
        resized = image.resize(self._resized(*image.size), Image.Resampling[self.interpolation.upper()])
        offset = self._offset(resized.width, width), self._offset(resized.height, height)
        cropped = Image.new("RGB", (width, height), tuple(round(255 * value) for value in self.mean))
        cropped.paste(resized, offset)
        return torch.from_numpy(np.array(cropped)).permute(2, 0, 1)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height to which an image is resized before the crop."""
        high, wide = (math.floor(side / self.crop_pct) for side in self.input_size)
        if self.crop_mode.startswith("squash"):
            return wide, high
        if self.crop_mode.startswith("center") and high == wide:  # timm rounds down here
            short = min(width, height)
            return int(wide * width / short), int(wide * height / short)
        ratio = (max if self.crop_mode == "border" else min)(width / wide, height / high)
        return round(width / ratio), round(height / ratio)

    def _offset(self, size: int, target: int) -> int:
        """Return where an image's side starts in its crop, or in the border around it."""
        if size < target:
            return (target - size) // 2
        return -((size - target) // 2 if self.crop_mode.endswith("_floor") else round((size - target) / 2))

    def resized_bytes(self, width: int, height: int) -> int:
        """Return the bytes needed to resize an image; for a line one pixel high, a multiple of the line."""
        if not self.crop_mode.startswith("center"):
            return 0  # at most the model's input size
        scale = max(self.input_size) / self.crop_pct / min(width, height)
        return _PIXEL_BYTES * math.ceil(scale * width) * (math.ceil(scale * height) + height)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 images (B, 3, H, W) to the model's float32 input, on the same device."""
        mean, std = (images.new_tensor(each, dtype=torch.float32).view(-1, 1, 1) for each in (self.mean, self.std))
        return (images.float() / 255).sub_(mean).div_(std)

    def as_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return asdict(self)

    @property
    def command_line(self) -> str:
        """Its options on the command line, without the input size."""
        return self.command_line_of("mean", "std", "interpolation", "crop_pct")

    def command_line_of(self, *names: str) -> str:
        """Return options with these names and their values, as on the command line."""
        values = {
            **{name: " ".join(f"{value:.8g}" for value in getattr(self, name)) for name in ("mean", "std")},
            "interpolation": self.interpolation,
            "crop_pct": f"{self.crop_pct:.4g}",
            "input_size": "{} {}".format(*self.input_size),
        }
        return " ".join(f"--{name.replace('_', '-')} {values[name]}" for name in names)


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """Return a model's preprocessing: its own input size, the rest from `config_of`, else ImageNet's."""
    config, unwrapped = config_of(model), unwrap_model(model)
    config["input_size"] = config.get("input_size") or (3, 224, 224)
    config["crop_pct"] = config.get("crop_pct") or IMAGENET_CROP_PCT
    height, width = config["input_size"][1:] if unwrapped.resizes else image_size(unwrapped.module, config)
    types = {"mean": tuple, "std": tuple, "interpolation": str, "crop_pct": float, "crop_mode": str}
    return Preprocessing((height, width), **{name: of(config[name]) for name, of in types.items() if config.get(name)})


def guessed_options(
    model: nn.Module, names: Sequence[str] = ("mean", "std", "interpolation", "crop_pct", "input_size")
) -> str:
    """Return those of these options, with their values, that a model's config lacks, so that ImageNet's are used."""
    config = config_of(model)
    if not config.get("mean") and not unwrap_model(model).is_timm:
        del config["input_size"]  # found by trying
    return preprocessing_of(model).command_line_of(*(name for name in names if not config.get(name)))


def as_tuple(value: Any, count: int | None = None) -> Any:
    """Return several numbers, which may be NumPy's, as a tuple of Python's; a single one `count` times."""
    if isinstance(value, Real) and count:
        return (plain_number(value),) * count
    return tuple(map(plain_number, value)) if isinstance(value, Iterable) and not isinstance(value, str) else value


def check_preprocessing(
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    interpolation: str | None,
    crop_pct: float | None,
    size: Sequence[int] | None = None,
) -> None:
    if size is not None and not (isinstance(size, Sequence) and len(size) == 2 and all(map(_is_side, size))):
        raise UsageError(f"input_size needs (height, width) in pixels, got {size}")
    for title, values in (("mean", mean), ("std", std)):
        if values is None:
            continue
        numbers = isinstance(values, Sequence) and all(isinstance(v, Real) and math.isfinite(v) for v in values)
        if not numbers or len(values) != 3:
            got = list(values) if isinstance(values, Sequence) else values
            raise UsageError(f"{title} needs three finite numbers (R G B), got {got}")
        if max(values) > 1:
            raise UsageError(f"{title} is for pixels in [0, 1], got {list(values)}; divide it by 255")
    if std is not None and min(std) <= 0:
        raise UsageError(f"std must be positive, got {list(std)}")
    if interpolation is not None and interpolation not in INTERPOLATIONS:
        raise UsageError(f'unknown interpolation "{interpolation}"; choose {", ".join(INTERPOLATIONS)}')
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise UsageError(f"crop-pct must be in (0, 1], got {crop_pct:g}")


def _is_side(value: object) -> bool:
    return isinstance(value, int) and value > 0


def image_size(model: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    return int(size[0]), int(size[1])
