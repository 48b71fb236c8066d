"""Frames of a run, read again from where they came from."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from remtta.errors import RemttaError, UsageError
from remtta.models.preprocessing import Preprocessing
from remtta.runs.reading import Row
from remtta.streams.decoding_budget import Budget
from remtta.streams.frames import Frame
from remtta.streams.images import load_image
from remtta.streams.prefetch import prefetch
from remtta.streams.video import iter_video

_BATCH = 25
_LIVE = ("camera", "url")

FrameKey = tuple[str, int | None]

_log = logging.getLogger("remtta")


def check_rereadable(run: Path, kind: str) -> None:
    """Refuse a run of a source of this kind if its frames cannot be read again.

    Raises:
        UsageError: With the remedy.
    """
    if kind in _LIVE:
        raise UsageError(
            f"{run} is a run of a live source, whose frames cannot be read again; record it to files first"
        )


def read_again(
    rows: Sequence[Row], preprocessing: Preprocessing, wait: Callable[[], None]
) -> Iterator[tuple[list[FrameKey], Tensor]]:
    """Batches of the frames that rows are of: which they are, as `frame_of` says, and uint8 pixels (B, 3, H, W).

    Raises:
        RemttaError: In the end, if none of them can be read again.
    """
    memory = Budget(afterwards=preprocessing.resized_bytes)
    again = prefetch(frames_of(rows), preprocessing.transform(), ahead=2 * _BATCH, memory=memory, wait=wait)
    reasons, found = [], False
    while batch := list(itertools.islice(again, _BATCH)):
        reasons += [f"{frame.source}: {frame.error}" for frame in batch if frame.image is None]
        readable = [((frame.source, frame.number), frame.image) for frame in batch if frame.image is not None]
        if readable:
            found = True
            yield [frame for frame, _ in readable], torch.stack([image for _, image in readable])
    if rows and not found:
        such = f", such as {reasons[0]}" if reasons else ""
        raise RemttaError(f"none of the {len(rows)} frames can be read again{such}")
    if reasons:
        _log.warning("%d of %d frames cannot be read again, such as %s", len(reasons), len(rows), reasons[0])


def frames_of(rows: Sequence[Row]) -> Iterator[Frame]:
    """The frames that rows are of, stills first, each video read once."""
    videos: dict[str, set[int]] = {}
    for row in rows:
        if "frame" in row:
            videos.setdefault(row["source"], set()).add(row["frame"])
        else:
            yield Frame(row["source"], partial(load_image, Path(row["source"])))
    for source, numbers in videos.items():
        upto = itertools.islice(iter_video(source), max(numbers) + 1)
        yield from (frame for frame in upto if frame.number in numbers)


def frame_of(row: Row) -> FrameKey:
    """Which frame a row is of: its source, and its number in a video."""
    return row["source"], row.get("frame")
