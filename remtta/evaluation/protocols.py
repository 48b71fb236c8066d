"""Published protocols by name, and how images become inputs without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from remtta.errors import UsageError
from remtta.evaluation.datasets import Dataset
from remtta.models.preprocessing import Preprocessing, preprocessing_of

Resize = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Protocol:
    """What a published table fixes, beside the methods' own settings.

    Attributes:
        input_size: Height and width of the model's input.
        crop_pct: Input size over the size the short side is brought to.
        batch_size: Images per update.
        interpolation: Resize filter.
        mean: Per channel, for pixels in [0, 1].
        std: Per channel, for pixels in [0, 1].
    """

    input_size: tuple[int, int]
    crop_pct: float
    batch_size: int
    interpolation: str = "bilinear"
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


PROTOCOLS: Mapping[str, Protocol] = {
    "rem-paper": Protocol(input_size=(224, 224), crop_pct=224 / 256, batch_size=50),
    "rem-paper-cifar": Protocol(input_size=(384, 384), crop_pct=1.0, batch_size=20),
}
"""The REM paper's: inputs in [0, 1] without normalisation; ImageNet-C by way of 256 pixels to 224, CIFAR-C to 384."""


def choose_preprocessing(model: nn.Module, dataset: Dataset, *, resize: Resize = "auto") -> Preprocessing:
    """The model's preprocessing, except that images already of its input size are taken as they are.

    Args:
        model: A timm model; a protocol's values travel in its `pretrained_cfg`.
        dataset: The images, whose sizes are known.
        resize: "auto" as above; "always" as the model's config says; "never" demands images of its input size.

    Raises:
        UsageError: If some images have the input size and others do not, or "never" meets another size.
    """
    configured = preprocessing_of(model)
    height, width = configured.input_size
    sizes = dataset.sizes
    fitting = sizes.get((width, height), 0)
    as_they_are = dataclasses.replace(configured, crop_pct=1.0)
    if resize == "always" or (resize == "auto" and not fitting):
        return configured
    if fitting == sum(sizes.values()):
        return as_they_are
    others = ", ".join(f"{w}x{h}" for (w, h), _ in sorted(sizes.items(), key=lambda item: -item[1])[:4])
    raise UsageError(
        f"{fitting} of {sum(sizes.values())} images have the model's input size of {width}x{height}, the others do not "
        f"(sizes: {others}); choose --resize always to resize and crop all of them"
    )
