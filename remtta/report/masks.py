"""Frames of a run as its model sees them, and as REM's most masked view of them does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from torch import nn

from remtta.errors import UsageError
from remtta.methods.masking import paint_over
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.preprocessing import preprocessing_of
from remtta.report.inspection import read_run
from remtta.report.pictures import address_of
from remtta.report.rereading import FrameKey, check_rereadable, frame_of, read_again
from remtta.runs.folder import RECORD
from remtta.runs.reading import Row


def largest_mask(folders: Sequence[Path]) -> REMConfig:
    """What a run masks by, with its largest mask alone.

    Raises:
        UsageError: If it is not one run, of a method that masks by scores, on frames that can be read again.
        RemttaError: If its record is damaged.
    """
    folder = folders[0]
    if len(folders) > 1 or not (folder / RECORD).is_file():
        raise UsageError("--masks is for one run of remtta adapt; give its folder alone")
    run = read_run(folder)
    check_rereadable(folder, run["source"]["kind"])
    method = run["method"]
    if not method.get("mask_ratios"):
        raise UsageError(f"--masks shows what REM hides, and {folder} is a run of {method['name']}; leave it out")
    config = REMConfig(mask_ratios=(0.0, method["mask_ratios"][-1]), masking=method.get("masking") or REMConfig.masking)
    if config.masking == "random":
        raise UsageError(f"--masks: those of {folder} were drawn at random and are not known; leave it out")
    return config


def masked_frames(
    model: nn.Module, config: REMConfig, wait: Callable[[], None], rows: Sequence[Row]
) -> list[tuple[str, ...]]:
    """Addresses of two small pictures of each row's frame, plain and masked; none where it cannot be read again.

    Args:
        model: The run's, with its delta.
        config: With one mask.
        wait: Called while frames are read; may raise to stop.
        rows: Predictions of the run.

    Raises:
        ModelError: If the model has no scores to mask by.
        RemttaError: If none of the frames can be read again.
    """
    rem, preprocessing = REM(model, config), preprocessing_of(model)
    drawn: dict[FrameKey, tuple[str, ...]] = {}
    for frames, pixels in read_again(rows, preprocessing, wait):
        _, (kept,) = rem.objective.views(preprocessing.normalise(pixels.to(rem.net.device)))
        for frame, image, positions in zip(frames, pixels.permute(0, 2, 3, 1).numpy(), kept, strict=True):
            views = image, paint_over(image, positions, rem.net.backbone.patch_size)
            drawn[frame] = tuple(address_of(Image.fromarray(view)) for view in views)
    return [drawn.get(frame_of(row), ()) for row in rows]
