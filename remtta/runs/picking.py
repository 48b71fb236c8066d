"""Frames of a run to label: drawn by chance, or doubtful ones of which no two are alike."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.backbones.families import backbone_of
from remtta.errors import RemttaError, UsageError
from remtta.files import write_atomically, writing
from remtta.models.preprocessing import Preprocessing, preprocessing_of
from remtta.runs.folder import PREDICTIONS, RECORD
from remtta.runs.reading import Row, checked_record, read_rows
from remtta.streams.decoding_budget import Budget
from remtta.streams.fitness import BLACK, DUPLICATE
from remtta.streams.frames import Frame
from remtta.streams.images import load_image
from remtta.streams.prefetch import prefetch
from remtta.streams.video import iter_video

CANDIDATES = 5  # so many times as many frames are looked at again
LIST = "picked.csv"
COLUMNS = ("index", "source", "frame", "class", "label", "prob", "entropy", "disagree", "label_true")
"""Of the list; the last one is left empty, for whoever labels."""

_BATCH = 25
_LIVE = ("camera", "url")

FrameKey = tuple[str, int | None]

_log = logging.getLogger("remtta")


@dataclass(frozen=True)
class Predicted:
    """What a run predicted.

    Attributes:
        rows: Of the frames that may be worth a label.
        num_classes: Of its model.
    """

    rows: Sequence[Row]
    num_classes: int

    def by_chance(self, count: int, seed: int) -> list[Row]:
        """So many of the rows, each as likely as any other."""
        return random.Random(seed).sample(self.rows, min(count, len(self.rows)))

    def doubtful(self, count: int) -> list[Row]:
        """So many of the rows, the most doubtful first."""
        return sorted(self.rows, key=lambda row: doubt(row, self.num_classes), reverse=True)[:count]


def read_predicted(run: Path) -> Predicted:
    """What a run predicted of its frames; black and repeated ones are left out.

    Raises:
        UsageError: If the folder holds no run, or one of a live source, whose frames cannot be read again.
        RemttaError: If its files are damaged, or hold no prediction.
    """
    if not (run / RECORD).is_file():
        raise UsageError(f"{run} holds no run (no {RECORD})")
    try:
        record = checked_record(run / RECORD, {"model.num_classes": int, "source.kind": str})
    except ValueError as error:
        raise RemttaError(f"{run / RECORD} is damaged: {error}") from error
    check_rereadable(run, record["source"]["kind"])
    rows = {row["index"]: row for row in read_rows(run / PREDICTIONS) if "class" in row}
    useful = [row for row in rows.values() if row.get("not_adapted") not in (BLACK, DUPLICATE)]
    if not useful:
        raise RemttaError(f"{run / PREDICTIONS} holds no prediction to pick from")
    return Predicted(useful, record["model"]["num_classes"])


def check_rereadable(run: Path, kind: str) -> None:
    """Refuse a run of a source of this kind if its frames cannot be read again.

    Raises:
        UsageError: With the remedy.
    """
    if kind in _LIVE:
        raise UsageError(
            f"{run} is a run of a live source, whose frames cannot be read again; record it to files first"
        )


def doubt(row: Row, num_classes: int) -> float:
    """The entropy as a share of its most, and 1 more where the adapted and the source model disagree."""
    return disagree(row) + float(row["entropy"]) / math.log(num_classes)


def disagree(row: Row) -> bool:
    """Whether the adapted and the source model were both asked, and named different classes."""
    return len({said["class"] for said in row.get("each", {}).values()}) > 1


def pick_by_doubt(
    model: nn.Module, predicted: Predicted, count: int, wait: Callable[[], None] = lambda: None
) -> list[Row]:
    """Rows of doubtful frames that are least alike, the first to label first.

    The most doubtful one of 5 times as many, and then always the one least like those picked.

    Args:
        model: The run's, with its delta.
        predicted: What to choose from.
        count: How many.
        wait: Called between batches; may raise to stop.

    Raises:
        RemttaError: If none of the frames can be read again.
    """
    rows, features = _features(model, predicted.doubtful(CANDIDATES * count), wait)
    return [rows[place] for place in farthest_first(features, count)]


def farthest_first(features: Tensor, count: int) -> list[int]:
    """Positions of the first one, and of those that lie farthest from all before them, by cosine.

    Args:
        features: Shape (N, D).
        count: At most so many.

    Source: k-center greedy, as for core-sets (Sener and Savarese, ICLR 2018).
    """
    directions = torch.nn.functional.normalize(features.float(), dim=-1)
    picked: list[int] = []
    likeness = torch.full((len(directions),), -2.0)
    for _ in range(min(count, len(directions))):
        likeness[picked] = math.inf
        picked.append(int(likeness.argmin()))
        likeness = torch.maximum(likeness, directions @ directions[picked[-1]])
    return picked


@torch.inference_mode()
def _features(model: nn.Module, rows: Sequence[Row], wait: Callable[[], None]) -> tuple[list[Row], Tensor]:
    """What the head makes its logits of, of each frame that can be read again, in the order of the rows."""
    preprocessing, backbone = preprocessing_of(model), backbone_of(model)
    by_frame = {frame_of(row): row for row in rows}
    found: dict[int, Tensor] = {}
    for frames, pixels in read_again(rows, preprocessing, wait):
        features = backbone.classify_with_features(preprocessing.normalise(pixels.to(backbone.device)))[1].cpu()
        found.update(zip([by_frame[frame]["index"] for frame in frames], features, strict=True))
    there = [row for row in rows if row["index"] in found]
    return there, torch.stack([found[row["index"]] for row in there])


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


def csv_text(rows: Sequence[Row]) -> str:
    """The list as CSV, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "disagree": int(disagree(row)) if "each" in row else ""} for row in rows)
    return text.getvalue()


def coco(rows: Sequence[Row], predicted: Predicted) -> dict[str, Any]:
    """The list as labelling tools read it: COCO's `images` and `categories`, and the predictions as `annotations`.

    Classes have the names by which any frame's predictions tell them, and else their numbers.
    """
    told = {each["class"]: each["label"] for row in predicted.rows for each in row.get("topk", (row,))}
    names = [told.get(number) or str(number) for number in range(predicted.num_classes)]
    images = [{"id": row["index"], "file_name": row["source"], **_only(row, "frame")} for row in rows]
    guesses = [
        {"id": row["index"], "image_id": row["index"], "category_id": row["class"], "score": row["prob"]}
        for row in rows
    ]
    return {
        "images": images,
        "categories": [{"id": number, "name": name} for number, name in enumerate(names)],
        "annotations": guesses,
    }


def _only(row: Row, name: str) -> Mapping[str, Any]:
    return {name: row[name]} if name in row else {}


def write_list(path: Path, rows: Sequence[Row], predicted: Predicted) -> None:
    """Write a .csv or a .json file, or copy the frames to a folder, with a list of them.

    Raises:
        OutputError: If the disk refuses.
    """
    if path.suffix in (".csv", ".json"):
        text = csv_text(rows) if path.suffix == ".csv" else json.dumps(coco(rows, predicted), indent=2)
        # Names that are not UTF-8 keep their bytes.
        write_atomically(path, partial(Path.write_text, data=text, encoding="utf-8", errors="surrogateescape"))
        return
    places = {frame_of(row): row["index"] for row in rows}
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        for frame in frames_of(rows):
            name, index = Path(frame.source), places[frame.source, frame.number]
            if frame.number is None:
                shutil.copyfile(name, path / f"{index:06d}_{name.name}")
            else:
                frame.load().save(path / f"{index:06d}_{name.stem}_{frame.number}.png")
    write_list(path / LIST, rows, predicted)
