"""Which settings suit a stream, tried on a stretch of it: by what predictions tell apart, and by any labels."""

from __future__ import annotations

import copy
import csv
import itertools
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from remtta.errors import StreamError, UsageError
from remtta.guard.evidence import mutual_information
from remtta.methods.losses import entropy
from remtta.methods.settings import METHOD_CONFIGS
from remtta.methods.settings.names import PRESET
from remtta.methods.settings.presets import PRESETS
from remtta.options import DEFAULT_BATCH_SIZE, RunOptions
from remtta.runs.adapt import adapt_stream
from remtta.runs.folder import PREDICTIONS
from remtta.runs.interrupts import Interrupts
from remtta.runs.reading import Row, read_rows
from remtta.streams.sources import Stream

Values = Mapping[str, Any]
Frame = tuple[str, int | None]
"""Where a frame comes from, and its number in a video."""

RATES: tuple[Values, ...] = ({}, {"lr": 0.001, "anchor": 0.0}, {"lr": 0.003}, {"lr": 0.03}, {"lr": 0.1})
"""Tried where nothing is asked for: the default, the paper's, and rates around the default's, each with its pull."""

WINDOW = 100
LEAST_WINDOWS = 3
_SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Trial:
    """What came of a stretch under some settings.

    Attributes:
        values: The settings that differ from the default; `method` and `batch_size` among them.
        information: What the adapted predictions tell apart, in nats, in each window of 100 frames.
        entropy: Mean of the adapted predictions', in nats.
        classes: How many different classes were predicted.
        right: Of each labelled frame, whether the adapted and the source model together had it.
        images_per_s: Speed.
    """

    values: Values
    information: Tensor
    entropy: float
    classes: int
    right: Tensor
    images_per_s: float


@dataclass(frozen=True)
class Lead:
    """What one trial has over another.

    Attributes:
        mean: In nats told apart, or as a share of labelled frames.
        standard_error: By windows, or by labelled frames.
    """

    mean: float
    standard_error: float

    @property
    def sure(self) -> bool:
        """Whether it is more than two standard errors."""
        return self.mean > _SURE * self.standard_error


@dataclass(frozen=True)
class Choice:
    """What to run.

    Attributes:
        trial: It.
        by: "evidence", "labels", or "default" where neither is sure.
    """

    trial: Trial
    by: str


def grid_of(values: Mapping[str, Sequence[Any]]) -> list[Values]:
    """The default, and every combination of these values.

    Raises:
        UsageError: If a method has no such setting, or a value is none.
    """
    rows = [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]
    settings: list[Values] = [{}, *(row for row in rows if row)] if rows else [{}]
    for each in settings:
        config_of(each)
    return settings


def config_of(values: Values) -> Any:
    """The config of a method under these settings, by the preset of `remtta adapt`.

    Raises:
        UsageError: If there is no such method or setting, or a value is none.
    """
    method, batch_size, own = split(values)
    if method not in METHOD_CONFIGS or method == "supervised":
        raise UsageError(f'unknown method "{method}"; remtta methods names them')
    return PRESETS[PRESET].config(method, own, batch_size=batch_size)


def split(values: Values) -> tuple[str, int, dict[str, Any]]:
    """Method, batch size, and the method's own settings."""
    own = {name: value for name, value in values.items() if name not in ("method", "batch_size")}
    return values.get("method", "rem"), values.get("batch_size", DEFAULT_BATCH_SIZE), own


def try_all(
    model: nn.Module,
    stream: Callable[[], Stream],
    settings: Sequence[Values],
    labels: Mapping[Frame, int],
    *,
    seed: int = 0,
    interrupts: Interrupts | None = None,
    on_trial: Callable[[], None] = lambda: None,
) -> list[Trial]:
    """Run the stretch under each of the settings, and first through the source model.

    Args:
        model: At its source weights, which it keeps.
        stream: Opens the stretch anew.
        settings: The default first.
        labels: True class numbers of some frames.
        seed: Of each run.
        interrupts: Turns signals into a stop.
        on_trial: Called after each.

    Returns:
        A trial each, that of the source first.

    Raises:
        StreamError: If the stretch has no readable frames, or its frames of another time were others.
        UsageError: If none of the labels is of a frame in the stretch.
    """
    trials: list[Trial] = []
    plain: Tensor | None = None
    for values in [{"method": "source"}, *settings]:
        frames, logits, rate = _run(copy.deepcopy(model), stream(), values, seed, interrupts or Interrupts())
        plain = logits if plain is None else plain
        if logits.shape != plain.shape:
            raise StreamError("the stretch had other frames when it was read again; record it to files first")
        places = [place for place, frame in enumerate(frames) if frame in labels]
        if labels and not places:
            raise UsageError(f"none of the {len(labels)} labels is of a frame in the stretch, such as {frames[0][0]}")
        truth = torch.tensor([labels[frames[place]] for place in places], dtype=torch.int64)
        together = logits[places].softmax(-1) + plain[places].softmax(-1)
        windows = (
            logits.split(WINDOW) if len(logits) < 2 * WINDOW else logits[: len(logits) // WINDOW * WINDOW].split(WINDOW)
        )
        trials.append(
            Trial(
                values=values,
                information=torch.tensor([mutual_information(window) for window in windows], dtype=torch.float64),
                entropy=float(entropy(logits).mean()),
                classes=len(logits.argmax(-1).unique()),
                right=together.argmax(-1) == truth,
                images_per_s=rate,
            )
        )
        on_trial()
    return trials


def _run(
    model: nn.Module, stream: Stream, values: Values, seed: int, interrupts: Interrupts
) -> tuple[list[Frame], Tensor, float]:
    """Frames of a run without the guard, the adapted model's logits (N, C) of each, and images per second."""
    method, batch_size, _ = split(values)
    options = RunOptions(batch_size=batch_size, logits=True, topk=1, guard=None, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        summary = adapt_stream(
            model, stream, run, method=method, config=config_of(values), options=options, interrupts=interrupts
        )
        interrupts.check()
        rows = [row for row in read_rows(run / PREDICTIONS) if "logits" in row]
    return [frame_of(row) for row in rows], torch.tensor([row["logits"] for row in rows]), summary.images_per_s


def frame_of(row: Row) -> Frame:
    """Where a row's frame comes from."""
    return row["source"], row.get("frame")


def choose(trials: Sequence[Trial]) -> Choice:
    """What to run: the default, unless something else is better by more than chance.

    Labels count first; then what the predictions tell apart, unless labels speak against it.

    Args:
        trials: The source's, the default's, and others.
    """
    default, others = trials[1], [trials[0], *trials[2:]]
    if labelled := [trial for trial in others if label_lead(trial, default).sure]:
        return Choice(max(labelled, key=lambda trial: label_lead(trial, default).mean), "labels")
    better = [each for each in others if lead(each, default).sure and not label_lead(default, each).sure]
    if better:
        return Choice(max(better, key=lambda trial: lead(trial, default).mean), "evidence")
    return Choice(default, "default")


def lead(trial: Trial, other: Trial) -> Lead:
    """What a trial's predictions tell apart more than another's, over the windows."""
    return _lead(trial.information - other.information, LEAST_WINDOWS)


def label_lead(trial: Trial, other: Trial) -> Lead:
    """How many more of the labelled frames a trial has right, as a share of them."""
    return _lead(trial.right.double() - other.right.double(), 2)


def _lead(differences: Tensor, least: int) -> Lead:
    if len(differences) < least:
        return Lead(float(differences.mean()) if len(differences) else 0.0, math.inf)
    return Lead(float(differences.mean()), float(differences.std()) / math.sqrt(len(differences)))


def read_true_labels(path: Path, names: Sequence[str] | None) -> dict[Frame, int]:
    """Frames and their classes from a CSV file with the columns `source`, `label_true`, and for videos `frame`.

    Rows without a label are passed over. A class is a number, or one of the names.

    Raises:
        UsageError: If the file cannot be read, lacks a column, or names a class that there is not.
    """
    numbers = {name: number for number, name in enumerate(names or ())}
    labels: dict[Frame, int] = {}
    try:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file)
            if not {"source", "label_true"} <= {*(reader.fieldnames or ())}:
                raise UsageError(f"{path} needs the columns source and label_true")
            for row in reader:
                told = row["label_true"].strip()
                if told and not told.isdecimal() and told not in numbers:
                    raise UsageError(f'{path}: "{told}" is no class number and no name of the model\'s classes')
                if told:
                    frame = int(row["frame"]) if row.get("frame") else None
                    labels[row["source"], frame] = numbers[told] if told in numbers else int(told)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as a list of labels: {error}") from error
    if not labels:
        raise UsageError(f"{path} has no label in its column label_true; fill some in")
    return labels
