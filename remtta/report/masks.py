"""Read the frames of a run again, and show them as its model sees them, plain and under REM's largest mask."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from PIL import Image
from torch import nn

from remtta.errors import FrameError, RemttaError, UsageError
from remtta.methods.mask_pictures import mask_pictures
from remtta.methods.rem import REM
from remtta.methods.settings import REMConfig
from remtta.models.preprocessing import preprocessing_of
from remtta.report.inspection import read_run
from remtta.report.pictures import address_of
from remtta.runs.folder import RECORD
from remtta.runs.reading import Row
from remtta.streams.frames import Frame
from remtta.streams.images import load_image
from remtta.streams.video import iter_video

_log = logging.getLogger("remtta")


def largest_mask(folders: Sequence[Path]) -> REMConfig:
    """Return the masking of a run, reduced to its largest mask.

    Raises:
        UsageError: If it is not a single run of a method that masks by scores, on frames that can be read again.
        RemttaError: If its record is damaged.
    """
    folder = folders[0]
    if len(folders) > 1 or not (folder / RECORD).is_file():
        raise UsageError("--masks is for one run of remtta adapt; give its folder alone")
    run = read_run(folder)
    if run["source"]["kind"] in ("camera", "url"):
        raise UsageError(
            f"{folder} is a run of a live source, whose frames cannot be read again; record it to files first"
        )
    method = run["method"]
    if not method.get("mask_ratios"):
        raise UsageError(f"--masks shows what REM hides, and {folder} is a run of {method['name']}; leave it out")
    config = REMConfig(mask_ratios=(0.0, method["mask_ratios"][-1]), masking=method.get("masking") or REMConfig.masking)
    if config.masking == "random":
        raise UsageError(f"--masks: the masks of {folder} were drawn at random and not recorded; leave it out")
    return config


def masked_frames(
    model: nn.Module, config: REMConfig, wait: Callable[[], None], rows: Sequence[Row]
) -> list[tuple[str, ...]]:
    """Return data URLs of two thumbnails of each row's frame, plain and masked; empty if it cannot be read again.

    Args:
        model: The run's model, with its delta.
        config: Settings with a single mask.
        wait: Called between frames; may raise to stop.

    Raises:
        ModelError: If the model has no scores to mask by.
        RemttaError: If none of the frames can be read again.
    """
    rem, preprocessing = REM(model, config), preprocessing_of(model)
    transform, drawn, reasons = preprocessing.transform(), {}, []
    for frame in _read_again(rows, wait):
        try:
            views = mask_pictures(rem, transform(frame.load())[None], preprocessing)
        except FrameError as error:
            reasons.append(f"{frame.source}: {error}")
            continue
        drawn[frame.source, frame.number] = tuple(address_of(Image.fromarray(view.pixels)) for (view,) in views)
    if rows and not drawn:
        such = f", such as {reasons[0]}" if reasons else ""
        raise RemttaError(f"none of the {len(rows)} frames can be read again{such}")
    if reasons:
        _log.warning("%d of %d frames cannot be read again, such as %s", len(reasons), len(rows), reasons[0])
    return [drawn.get((row["source"], row.get("frame")), ()) for row in rows]


def _read_again(rows: Sequence[Row], wait: Callable[[], None]) -> Iterator[Frame]:
    """Yield the frames of rows, stills first; each video is read once."""
    videos: dict[str, set[int]] = {}
    for row in rows:
        if "frame" in row:
            videos.setdefault(row["source"], set()).add(row["frame"])
        else:
            wait()
            yield Frame(row["source"], partial(load_image, Path(row["source"])))
    for source, numbers in videos.items():
        for frame in itertools.islice(iter_video(source), max(numbers) + 1):
            wait()
            if frame.number in numbers:
                yield frame
