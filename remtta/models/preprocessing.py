"""The preprocessing of images for a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform, resolve_model_data_config
from torch import Tensor, nn
from torchvision.transforms.functional import normalize

from remtta.errors import UsageError
from remtta.models.metadata import PretrainedConfig
from remtta.models.unwrapping import config_of, unwrap_model

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")

_PIXEL_BYTES = 4  # in Pillow, which resizes first the rows, then the columns


@dataclass(frozen=True)
class Preprocessing:
    """The preprocessing of an image: resize the short side, centre crop, normalise.

    Attributes:
        input_size: Height and width, in pixels.
        mean: Mean per channel, for pixel values in [0, 1].
        std: Standard deviation per channel, likewise.
        interpolation: Resize filter in timm's terms, such as "bicubic".
        crop_pct: Share of the resized image's short side that the crop keeps.
        crop_mode: "center", "squash" or "border", as in timm.

    Raises:
        UsageError: If a value is out of range.
    """

    input_size: tuple[int, int]
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"
    crop_pct: float = 0.875
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        size = self.input_size
        if not isinstance(size, Sequence) or len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
            raise UsageError(f"input_size needs (height, width) in pixels, got {size}")
        check_preprocessing(self.mean, self.std, self.interpolation, self.crop_pct)
        if self.crop_mode not in CROP_MODES:
            raise UsageError(f'unknown crop_mode "{self.crop_mode}"; choose {", ".join(CROP_MODES)}')

    def transform(self) -> Callable[[Image.Image], Tensor]:
        """Return timm's evaluation transform from a PIL image to a uint8 tensor (3, H, W)."""
        return create_transform(
            input_size=(3, *self.input_size),
            interpolation=self.interpolation,
            crop_pct=self.crop_pct,
            crop_mode=self.crop_mode,
            normalize=False,
        )

    def resized_bytes(self, width: int, height: int) -> int:
        """Return the bytes needed to resize an image; for a line one pixel high, a multiple of the line."""
        if self.crop_mode != "center":
            return 0  # at most the model's input size
        scale = max(self.input_size) / self.crop_pct / min(width, height)
        return _PIXEL_BYTES * math.ceil(scale * width) * (math.ceil(scale * height) + height)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise uint8 images (B, 3, H, W) to the model's float32 input, on the same device."""
        return normalize(images.float() / 255, self.mean, self.std, inplace=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the values, ready for JSON."""
        return asdict(self)


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """Return a model's preprocessing: its own input size, the rest from `config_of`, else ImageNet's."""
    config = resolve_model_data_config(model, pretrained_cfg=config_of(model))
    unwrapped = unwrap_model(model)
    height, width = config["input_size"][1:] if unwrapped.resizes else image_size(unwrapped.module, config)
    return Preprocessing(
        input_size=(height, width),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        crop_pct=float(config["crop_pct"]),
        crop_mode=config["crop_mode"],
    )


def check_preprocessing(
    mean: Sequence[float] | None, std: Sequence[float] | None, interpolation: str | None, crop_pct: float | None
) -> None:
    for title, values in (("mean", mean), ("std", std)):
        if values is None:
            continue
        if not isinstance(values, Sequence) or len(values) != 3 or not all(map(math.isfinite, values)):
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


def image_size(model: nn.Module, config: PretrainedConfig) -> tuple[int, int]:
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or config["input_size"][1:]
    return int(size[0]), int(size[1])
