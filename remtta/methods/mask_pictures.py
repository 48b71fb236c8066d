"""Images as masked views see them, with the resulting predictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from remtta.drawing import paint_over
from remtta.methods.losses import entropy
from remtta.methods.method import Updater
from remtta.methods.rem import RankedEntropy
from remtta.models.preprocessing import Preprocessing


class MaskPicture(NamedTuple):
    """An image as a view: pixels (H, W, 3) with hidden patches hatched, the predicted class, and its entropy in
    nats.
    """

    pixels: np.ndarray
    guess: int
    nats: float


@torch.no_grad()
def mask_pictures(
    rem: Updater[RankedEntropy], pixels: Tensor, preprocessing: Preprocessing
) -> Iterator[list[MaskPicture]]:
    """Yield all images (B, 3, H, W), in uint8, for each view, the plain one first.

    Raises:
        ModelError: If the model has no scores to mask by.
    """
    views, masks = rem.objective.views(rem.net.enter(preprocessing.normalise(pixels.to(rem.net.device))))
    plain, patch_size = pixels.permute(0, 2, 3, 1).numpy(), rem.net.backbone.patch_size
    for logits, kept in zip(views, [None, *masks], strict=True):
        shown = (
            plain
            if kept is None
            else [paint_over(*each, patch_size) for each in zip(plain, kept.tolist(), strict=True)]
        )
        yield [
            MaskPicture(*each)
            for each in zip(shown, logits.argmax(1).tolist(), entropy(logits).abs().tolist(), strict=True)
        ]
